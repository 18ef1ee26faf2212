//! Groups of several contexts in one process, over real sockets on the loopback device.
#![allow(clippy::unwrap_used, reason = "a test panics where a step fails")]

mod calls;

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
    ptr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use mooncake_base::{Error, ErrorCode, Result, Token};
use mooncake_collective::{
    Completion, Context, ContextConfig, Dtype, Fabric, Group, GroupConfig, HostRange, Operation,
    Outcome, Reduction, Status,
};

/// Far above what any step takes, also on a loaded machine.
const LIMIT: Duration = Duration::from_secs(60);
const I64: u8 = 4;

fn context(rank: u32, coordinator: Option<&str>, token: Option<&str>) -> Context {
    context_at(Ipv4Addr::LOCALHOST, rank, coordinator, token)
}

fn context_at(
    host: Ipv4Addr,
    rank: u32,
    coordinator: Option<&str>,
    token: Option<&str>,
) -> Context {
    context_with(host, rank, coordinator, token, None)
}

fn context_with(
    host: Ipv4Addr,
    rank: u32,
    coordinator: Option<&str>,
    token: Option<&str>,
    fabric: Option<Arc<dyn Fabric>>,
) -> Context {
    // A failed read waits for the end of a silent rank.
    let heartbeat_timeout = if fabric.is_some() { LIMIT / 12 } else { LIMIT };
    let config = ContextConfig {
        fabric,
        rank,
        host: IpAddr::V4(host),
        coordinator: coordinator.map(ToOwned::to_owned),
        token: token.map(|secret| Token::new(secret).unwrap()),
        heartbeat_timeout,
        bootstrap_timeout: LIMIT,
    };
    Context::start(&config).unwrap()
}

fn contexts(count: u32) -> Vec<Arc<Context>> {
    let first = Arc::new(context(0, None, None));
    let address = first.coordinator_address().to_owned();
    let others = (1..count).map(|rank| Arc::new(context(rank, Some(&address), None)));
    std::iter::once(Arc::clone(&first)).chain(others).collect()
}

/// Two contexts that take each other for hosts of their own: they lend no memory.
fn contexts_of_two_hosts() -> Vec<Arc<Context>> {
    let first = Arc::new(context_at(Ipv4Addr::new(127, 0, 0, 2), 0, None, None));
    let second = Arc::new(context(1, Some(first.coordinator_address()), None));
    vec![first, second]
}

/// Reads memory of this process as devices read that of another host, if it is registered.
#[derive(Debug, Default)]
struct CopyingFabric {
    registered: Mutex<BTreeMap<u64, u64>>,
    reads: AtomicUsize,
    is_broken: AtomicBool,
}

impl Fabric for CopyingFabric {
    fn segment(&self) -> &str {
        "other-host"
    }

    fn register(&self, address: u64, length: u64) -> Result<()> {
        self.registered.lock().unwrap().insert(address, length);
        Ok(())
    }

    fn unregister(&self, address: u64) {
        self.registered.lock().unwrap().remove(&address).unwrap();
    }

    fn read(&self, segment: &str, address: u64, target: (u64, u64), _: Duration) -> Result<()> {
        assert_eq!(segment, "other-host");
        let registered = self.registered.lock().unwrap();
        let holds = |at: u64| {
            let range = registered.range(..=at).next_back();
            range.is_some_and(|(start, length)| at + target.1 <= start + length)
        };
        if !holds(address) || !holds(target.0) || self.is_broken.load(Ordering::SeqCst) {
            return Err(Error::invalid("the device cannot read"));
        }
        self.reads.fetch_add(1, Ordering::SeqCst);
        // SAFETY: both ranges are registered, and stay so while the lock is held.
        unsafe { ptr::copy(address as *const u8, target.0 as *mut u8, target.1 as usize) };
        Ok(())
    }
}

/// Two contexts of different hosts that read each other's memory through one fabric.
fn contexts_with_fabric(fabric: &Arc<CopyingFabric>) -> Vec<Arc<Context>> {
    let fabric = || Some(Arc::clone(fabric) as Arc<dyn Fabric>);
    let first = Arc::new(context_with(Ipv4Addr::new(127, 0, 0, 2), 0, None, None, fabric()));
    let address = first.coordinator_address().to_owned();
    let second = Arc::new(context_with(Ipv4Addr::LOCALHOST, 1, Some(&address), None, fabric()));
    vec![first, second]
}

fn config(slot: usize, declared: usize, capacity: usize) -> GroupConfig {
    GroupConfig {
        name: "test".to_owned(),
        slot,
        declared,
        capacity,
        is_extension: false,
        removes_lost: true,
        first_rank: 0,
        made_within: LIMIT,
    }
}

/// Makes a group of all contexts.
fn groups(contexts: &[Arc<Context>], capacity: usize) -> Vec<Arc<Group>> {
    let count = contexts.len();
    let makers: Vec<_> = contexts
        .iter()
        .map(Arc::clone)
        .enumerate()
        .map(|(slot, context)| {
            thread::spawn(move || Arc::new(context.group(&config(slot, count, capacity)).unwrap()))
        })
        .collect();
    makers.into_iter().map(|maker| maker.join().unwrap()).collect()
}

fn done(completion: &Completion) -> Outcome {
    assert!(completion.wait(LIMIT), "the operation is not done in time");
    completion.outcome().unwrap()
}

fn range(values: &mut [i64]) -> HostRange {
    // SAFETY: each test waits for its operations before the memory is gone.
    unsafe { HostRange::new(values.as_mut_ptr() as usize, size_of_val(values)) }
}

fn sum(values: &mut [i64]) -> Operation {
    let range = range(values);
    Operation::Reduce {
        source: range,
        target: range,
        dtype: Dtype::I64,
        how: Reduction::Sum,
        root: None,
    }
}

/// Adds 2^slot over the members, and returns what each got, and its outcome.
fn add_up(groups: &[Arc<Group>], slots: &[usize], count: usize) -> Vec<(i64, Outcome)> {
    let mut values: Vec<Vec<i64>> = slots.iter().map(|slot| vec![1 << slot; count]).collect();
    let begun: Vec<_> = groups
        .iter()
        .zip(&mut values)
        .map(|(group, values)| group.begin(sum(values)).unwrap())
        .collect();
    let outcomes: Vec<_> = begun.iter().map(done).collect();
    values
        .iter()
        .zip(outcomes)
        .map(|(values, outcome)| {
            assert!(values.iter().all(|value| *value == values[0]), "a torn sum");
            (values[0], outcome)
        })
        .collect()
}

#[test]
fn sums_of_any_length_agree() {
    let contexts = contexts(3);
    let groups = groups(&contexts, 3);
    for count in [1, 7, 2048, 2049, 100_003] {
        for (value, outcome) in add_up(&groups, &[0, 1, 2], count) {
            assert_eq!(value, 7);
            assert!(outcome.error.is_none() && outcome.failed_slots.is_empty());
        }
    }
}

/// Exchanges bytes by each operation that copies them, round by round, so that memory is used again.
/// A slow member writes its results while the others are in the next round.
fn exchange_rounds(groups: &[Arc<Group>], length: usize) {
    const ROUNDS: i64 = 4;
    let count = groups.len();
    thread::scope(|scope| {
        for (slot, group) in groups.iter().enumerate() {
            scope.spawn(move || {
                let mut own = vec![0; length];
                let mut all = vec![vec![0; length]; count];
                for round in 0..ROUNDS {
                    let value = |from: usize, to: usize| round * 100 + (from * 10 + to) as i64;
                    own.fill(value(slot, 9));
                    let mut ranges: Vec<_> = all.iter_mut().map(|part| range(part)).collect();
                    let gather = Operation::Gather {
                        source: range(&mut own),
                        targets: ranges,
                        elements: I64,
                        root: None,
                    };
                    done(&group.begin(gather).unwrap());
                    for (from, part) in all.iter().enumerate() {
                        assert!(part.iter().all(|it| *it == value(from, 9)), "gather, {round}");
                    }
                    let mut sources: Vec<_> =
                        (0..count).map(|to| vec![value(slot, to); length]).collect();
                    let sources = sources.iter_mut().map(|part| range(part)).collect();
                    ranges = all.iter_mut().map(|part| range(part)).collect();
                    done(
                        &group
                            .begin(Operation::AllToAll { sources, targets: ranges, elements: I64 })
                            .unwrap(),
                    );
                    for (from, part) in all.iter().enumerate() {
                        assert!(part.iter().all(|it| *it == value(from, slot)), "all to all");
                    }
                    let root = usize::try_from(round).unwrap() % count;
                    own.fill(value(slot, 8));
                    let broadcast =
                        Operation::Broadcast { range: range(&mut own), elements: I64, root };
                    done(&group.begin(broadcast).unwrap());
                    assert!(own.iter().all(|it| *it == value(root, 8)), "broadcast, {round}");
                    own.fill(1 << slot);
                    done(&group.begin(sum(&mut own)).unwrap());
                    assert!(own.iter().all(|it| *it == (1 << count) - 1), "sum, {round}");
                }
            });
        }
    });
}

#[test]
fn bytes_of_any_length_arrive_whole_in_each_round() {
    let contexts = contexts(3);
    let groups = groups(&contexts, 3);
    for length in [1, 3_000, 40_000, 90_000, 700_000] {
        exchange_rounds(&groups, length);
    }
}

#[test]
fn bytes_of_any_length_arrive_whole_between_hosts() {
    let contexts = contexts_of_two_hosts();
    let groups = groups(&contexts, 2);
    for length in [1, 3_000, 90_000, 700_000] {
        exchange_rounds(&groups, length);
    }
}

#[test]
fn large_parts_of_another_host_are_read_through_the_fabric() {
    let fabric = Arc::new(CopyingFabric::default());
    let contexts = contexts_with_fabric(&fabric);
    let groups = groups(&contexts, 2);
    exchange_rounds(&groups, 3_000);
    assert_eq!(fabric.reads.load(Ordering::SeqCst), 0);
    exchange_rounds(&groups, 90_000);
    // In each round each rank reads for gather, all to all and twice for the sum, and one of them
    // for the broadcast.
    assert_eq!(fabric.reads.load(Ordering::SeqCst), 4 * (2 * 4 + 1));
    let fetched: u64 = groups.iter().map(|group| group.counters().bytes_fetched).sum();
    assert_eq!(fetched, 4 * (2 * (90_000 + 90_000 + 45_000 + 45_000) + 90_000) * 8);
}

#[test]
fn memory_that_cannot_be_read_is_an_error_at_each_rank() {
    let fabric = Arc::new(CopyingFabric::default());
    let contexts = contexts_with_fabric(&fabric);
    let groups = groups(&contexts, 2);
    fabric.is_broken.store(true, Ordering::SeqCst);
    for (_, outcome) in add_up(&groups, &[0, 1], 1) {
        assert!(outcome.error.is_none(), "{outcome:?}");
    }
    let mut values = [vec![1; 90_000], vec![2; 90_000]];
    let begun: Vec<_> = groups
        .iter()
        .zip(&mut values)
        .map(|(group, values)| group.begin(sum(values)).unwrap())
        .collect();
    assert!(begun.iter().map(done).all(|outcome| outcome.error.is_some()));
    fabric.is_broken.store(false, Ordering::SeqCst);
    exchange_rounds(&groups, 90_000);
}

#[test]
fn members_are_ready_as_soon_as_the_group_is_made() {
    let contexts = contexts(2);
    for number in 0..50 {
        let makers = contexts.iter().map(Arc::clone).enumerate();
        let makers = makers.map(|(slot, context)| {
            let config = GroupConfig { name: number.to_string(), ..config(slot, 2, 3) };
            thread::spawn(move || {
                let group = context.group(&config).unwrap();
                (group.peers(), group)
            })
        });
        let made: Vec<_> =
            makers.collect::<Vec<_>>().into_iter().map(|it| it.join().unwrap()).collect();
        for (peers, _) in &made {
            assert_eq!(*peers, [true, true, false]);
        }
    }
}

#[test]
fn rank_that_leaves_makes_the_group_smaller() {
    let contexts = contexts(3);
    let mut groups = groups(&contexts, 3);
    drop(groups.pop());
    for count in [4, 500_000] {
        for (value, outcome) in add_up(&groups, &[0, 1], count) {
            assert_eq!(value, 3);
            assert!(outcome.error.is_none(), "{outcome:?}");
        }
    }
    assert_eq!(groups[0].active(), [true, true, false]);
    assert_eq!(groups[0].size(), 2);
}

#[test]
fn operation_in_progress_ends_when_a_rank_leaves() {
    let contexts = contexts(3);
    let mut groups = groups(&contexts, 3);
    let leaver = groups.pop().unwrap();
    let mut values = [[1i64; 50_000], [2; 50_000]];
    let begun: Vec<_> = groups
        .iter()
        .zip(&mut values)
        .map(|(group, values)| group.begin(sum(values)).unwrap())
        .collect();
    assert!(begun.iter().all(|completion| !completion.wait(Duration::ZERO)));
    leaver.close();
    for completion in &begun {
        assert!(done(completion).error.is_none());
    }
    assert!(values.iter().flatten().all(|value| *value == 3));
}

#[test]
fn extension_rank_is_alone_until_it_is_activated() {
    let contexts = contexts(3);
    let founders = groups(&contexts[..2], 3);
    let wish = GroupConfig { is_extension: true, ..config(2, 3, 3) };
    let newcomer = contexts[2].group(&wish).unwrap();
    let mut alone = [4i64];
    assert!(done(&newcomer.begin(sum(&mut alone)).unwrap()).error.is_none());
    assert_eq!(alone, [4]);

    let early = founders[0].activate(vec![2], LIMIT).unwrap();
    assert_eq!(early.status, Status::NotReady);
    assert!(early.reason.contains("rank=2"), "{}", early.reason);

    newcomer.begin_join().unwrap();
    loop {
        let version = founders[1].peers_version();
        if founders[1].peers()[2] {
            break;
        }
        assert!(founders[1].wait_peers(version, LIMIT).unwrap(), "the newcomer never waits");
    }
    assert_eq!(founders[1].activate(vec![2], LIMIT).unwrap().status, Status::Applied);
    assert!(newcomer.wait_joined(LIMIT).unwrap());
    let all = [&founders[0], &founders[1], &Arc::new(newcomer)].map(Arc::clone);
    for (value, _) in add_up(&all, &[0, 1, 2], 30_000) {
        assert_eq!(value, 7);
    }
    // Another activation is harmless.
    assert_eq!(founders[0].activate(vec![2], LIMIT).unwrap().status, Status::Applied);
}

#[test]
fn messages_match_by_source_and_tag() {
    let contexts = contexts(2);
    let groups = groups(&contexts, 2);
    let mut values = [[1i64], [2], [0], [0]];
    let [first, second, third, fourth] = &mut values;
    let sent =
        [groups[0].send(range(first), 1, 8).unwrap(), groups[0].send(range(second), 1, 9).unwrap()];
    assert!(!sent[0].wait(Duration::ZERO), "nobody has received the message");
    let nine = groups[1].receive(range(third), None, 9).unwrap();
    assert_eq!(done(&nine).source, Some(0));
    done(&groups[1].receive(range(fourth), Some(0), 8).unwrap());
    sent.iter().for_each(|sent| assert!(done(sent).error.is_none()));
    assert_eq!(values, [[1], [2], [2], [1]]);
}

#[test]
fn ranks_of_two_hosts_add_up() {
    let contexts = contexts_of_two_hosts();
    let groups = groups(&contexts, 2);
    for count in [1, 500_000] {
        for (value, outcome) in add_up(&groups, &[0, 1], count) {
            assert!(value == 3 && outcome.error.is_none(), "{outcome:?}");
        }
    }
}

/// Lets both ranks send `count` messages before either receives one.
fn exchange_early_messages(groups: &[Arc<Group>], count: usize, length: usize) {
    const BUFFERED_MAX: u64 = 8 << 20;
    let source: Vec<Vec<i64>> =
        (0..count).map(|number| vec![i64::try_from(number).unwrap(); length]).collect();
    let mut last = [7i64];
    let mut sent = Vec::new();
    for (slot, group) in groups.iter().enumerate() {
        let tag = |number| u32::try_from(number).unwrap();
        let ranges = source.iter().enumerate().map(|(number, values)| {
            // SAFETY: the test waits for the messages before the memory is gone.
            let range =
                unsafe { HostRange::new(values.as_ptr() as usize, size_of_val(values.as_slice())) };
            group.send(range, 1 - slot, tag(number)).unwrap()
        });
        sent.extend(ranges);
        sent.push(group.send(range(&mut last), 1 - slot, tag(count)).unwrap());
    }
    for (slot, group) in groups.iter().enumerate() {
        let mut value = [0i64];
        let tag = u32::try_from(count).unwrap();
        // Messages are written in order: with the last one, all others are there.
        done(&group.receive(range(&mut value), Some(1 - slot), tag).unwrap());
        assert_eq!(value, [7]);
        let buffered = group.counters().bytes_buffered;
        assert!(0 < buffered && buffered <= BUFFERED_MAX, "{buffered}");
    }
    for (slot, group) in groups.iter().enumerate() {
        for (number, values) in source.iter().enumerate() {
            let mut got = vec![0; length];
            let tag = u32::try_from(number).unwrap();
            let outcome = done(&group.receive(range(&mut got), Some(1 - slot), tag).unwrap());
            assert!(outcome.error.is_none() && got == *values, "{number}: {outcome:?}");
        }
        assert_eq!(group.counters().bytes_buffered, 0);
    }
    assert!(sent.iter().all(|sent| done(sent).error.is_none()));
}

#[test]
fn early_messages_of_one_host_take_bounded_memory() {
    let contexts = contexts(2);
    exchange_early_messages(&groups(&contexts, 2), 200, 16 << 10);
}

#[test]
fn early_messages_of_two_hosts_take_bounded_memory() {
    let contexts = contexts_of_two_hosts();
    let groups = groups(&contexts, 2);
    exchange_early_messages(&groups, 200, 16 << 10);
    // Room is free again, and one message alone may be larger than all of it.
    exchange_early_messages(&groups, 200, 16 << 10);
    let mut large = vec![5i64; 2 << 20];
    let mut got = vec![0i64; 2 << 20];
    let sent = groups[0].send(range(&mut large), 1, 0).unwrap();
    done(&groups[1].receive(range(&mut got), Some(0), 0).unwrap());
    assert!(done(&sent).error.is_none() && got == large);
}

#[test]
fn message_that_was_requested_ends_when_its_source_leaves() {
    let contexts = contexts_of_two_hosts();
    let groups = groups(&contexts, 2);
    let (mut large, mut small) = (vec![5i64; 2 << 20], vec![0i64; 3]);
    let sent = groups[0].send(range(&mut large), 1, 0).unwrap();
    let wrong = groups[1].receive(range(&mut small), Some(0), 0).unwrap();
    assert!(done(&wrong).error.unwrap().to_string().contains("another length"));
    assert!(done(&sent).error.is_none(), "the receiver has refused it");
    let sent = groups[0].send(range(&mut large), 1, 1).unwrap();
    groups[1].close();
    assert_eq!(done(&sent).failed_slots, [1]);
}

#[test]
fn end_of_a_context_ends_the_operations_of_its_groups() {
    let mut contexts = contexts(2);
    let groups = groups(&contexts, 2);
    let mut value = [1i64];
    let begun = groups[1].begin(sum(&mut value)).unwrap();
    drop(contexts.pop());
    let error = done(&begun).error.unwrap().to_string();
    assert!(error.contains("closed"), "{error}");
    assert!(groups[1].begin(Operation::Barrier).is_err());
}

#[test]
fn number_of_messages_in_progress_is_limited() {
    let contexts = contexts(2);
    let groups = groups(&contexts, 2);
    let mut value = [0i64];
    let range = range(&mut value);
    let waiting: Vec<_> =
        (0..1 << 16).map(|tag| groups[0].receive(range, Some(1), tag).unwrap()).collect();
    let error = groups[0].receive(range, Some(1), 0).unwrap_err().to_string();
    assert!(error.contains("wait for some of them"), "{error}");
    groups[0].close();
    assert!(waiting.iter().all(|waiting| done(waiting).error.is_some()));
}

#[test]
fn waiting_receive_ends_when_its_source_leaves() {
    let contexts = contexts(2);
    let groups = groups(&contexts, 2);
    let mut value = [0i64];
    let waiting = groups[0].receive(range(&mut value), Some(1), 0).unwrap();
    groups[1].close();
    assert_eq!(done(&waiting).failed_slots, [1]);
}

#[test]
fn tensors_of_different_sizes_are_an_error_at_each_rank() {
    let contexts = contexts(2);
    let groups = groups(&contexts, 2);
    let (mut long, mut short) = ([1i64; 4], [1i64; 3]);
    let begun =
        [groups[0].begin(sum(&mut long)).unwrap(), groups[1].begin(sum(&mut short)).unwrap()];
    for completion in &begun {
        let error = done(completion).error.unwrap().to_string();
        assert!(error.contains("differ in size"), "{error}");
    }
    // The group goes on.
    assert_eq!(add_up(&groups, &[0, 1], 5)[0].0, 3);
}

#[test]
fn wrong_capacity_and_taken_slot_are_refused() {
    let contexts = contexts(3);
    let _groups = groups(&contexts[..2], 3);
    let refusal = |config: GroupConfig| contexts[2].group(&config).unwrap_err().to_string();
    let extension =
        |slot, capacity| GroupConfig { is_extension: true, ..config(slot, 3, capacity) };
    assert!(refusal(extension(2, 4)).contains("max_group_size"));
    assert!(refusal(extension(1, 3)).contains("taken"));
    assert!(refusal(extension(3, 3)).contains("no such slot"));
    assert!(refusal(config(2, 3, 3)).contains("is_extension"));
}

#[test]
fn absent_ranks_are_named_when_the_time_is_up() {
    let contexts = contexts(2);
    let wish = |slot, made_within| GroupConfig { made_within, ..config(slot, 4, 4) };
    let patient = thread::spawn({
        let (context, wish) = (Arc::clone(&contexts[1]), wish(1, LIMIT));
        move || context.group(&wish).unwrap_err().to_string()
    });
    let begin = Instant::now();
    let error = contexts[0].group(&wish(0, Duration::from_millis(500))).unwrap_err();
    assert!(begin.elapsed() < LIMIT / 2);
    assert_eq!(error.code(), ErrorCode::RPC_TIMEOUT);
    assert!(error.to_string().contains("2, 3]"), "{error}");
    // The other one does not wait for what cannot be any more.
    let error = patient.join().unwrap();
    assert!(error.contains("rank=0") && error.contains("2, 3]"), "{error}");
}

#[test]
fn groups_of_one_name_and_other_ranks_are_apart() {
    let contexts = contexts(3);
    let alone = GroupConfig { first_rank: 2, ..config(0, 1, 1) };
    let single = [Arc::new(contexts[2].group(&alone).unwrap())];
    let pair = groups(&contexts[..2], 2);
    assert_eq!(add_up(&pair, &[0, 1], 5)[0].0, 3);
    assert_eq!(add_up(&single, &[0], 5)[0].0, 1);
}

#[test]
fn ranks_with_another_token_are_refused() {
    let first = context(0, None, Some("a long secret"));
    let address = first.coordinator_address().to_owned();
    drop(context(1, Some(&address), Some("a long secret")));
    for token in [None, Some("another secret")] {
        let config = ContextConfig {
            fabric: None,
            rank: 1,
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            coordinator: Some(address.clone()),
            token: token.map(|secret| Token::new(secret).unwrap()),
            heartbeat_timeout: LIMIT,
            bootstrap_timeout: LIMIT,
        };
        let error = Context::start(&config).unwrap_err().to_string();
        assert!(error.contains("cannot start"), "{error}");
    }
}

#[test]
fn end_of_the_coordinator_is_an_error_at_the_others() {
    let mut contexts = contexts(2);
    let mut groups = groups(&contexts, 2);
    let survivor = groups.pop().unwrap();
    let mut value = [1i64];
    drop(groups);
    drop(contexts.remove(0));
    let mut ended = survivor.begin(sum(&mut value));
    // The group of one may still end operations until it knows.
    while let Ok(completion) = &ended {
        if done(completion).error.is_some() {
            return;
        }
        ended = survivor.begin(sum(&mut value));
    }
}

#[test]
fn sizes_that_differ_in_one_part_end_the_operation_everywhere() {
    let contexts = contexts(3);
    let groups = groups(&contexts, 3);
    // The first two parts have the same length at all ranks: only the last rank sees the difference.
    let mut values = [vec![1i64; 3000], vec![1; 3001], vec![1; 3001]];
    let begun: Vec<_> = groups
        .iter()
        .zip(&mut values)
        .map(|(group, values)| group.begin(sum(values)).unwrap())
        .collect();
    for completion in &begun {
        let error = done(completion).error.unwrap().to_string();
        assert!(error.contains("differ in size"), "{error}");
    }
    assert_eq!(add_up(&groups, &[0, 1, 2], 5)[0].0, 7);
}

/// Sends numbered messages, each of one of the lengths, and returns the memory and the completions.
fn send_numbered(
    group: &Group,
    to: usize,
    count: i64,
    lengths: &[usize],
) -> (Vec<Vec<i64>>, Vec<Completion>) {
    let lengths = lengths.iter().copied().cycle();
    let mut sources: Vec<_> = (0..count).zip(lengths).map(|(i, length)| vec![i; length]).collect();
    let sent = sources.iter_mut().map(|source| group.send(range(source), to, 0).unwrap());
    let sent = sent.collect();
    (sources, sent)
}

fn receive_numbered(group: &Group, from: usize, count: i64, lengths: &[usize]) {
    for (number, &length) in (0..count).zip(lengths.iter().cycle()) {
        let mut target = vec![-1; length];
        let outcome = done(&group.receive(range(&mut target), Some(from), 0).unwrap());
        assert!(outcome.error.is_none() && outcome.failed_slots.is_empty(), "{outcome:?}");
        assert!(target.iter().all(|value| *value == number), "message {number}: {}", target[0]);
    }
}

#[test]
fn messages_of_all_sizes_keep_their_order_both_ways() {
    const COUNT: i64 = 2000;
    // Some are written by the caller, some by the thread for messages, some are lent.
    const LENGTHS: [usize; 7] = [1, 1, 512, 513, 1, 40_000, 2];
    let contexts = contexts(2);
    let groups = groups(&contexts, 2);
    thread::scope(|scope| {
        for (slot, group) in groups.iter().enumerate() {
            scope.spawn(move || {
                let (sources, sent) = send_numbered(group, 1 - slot, COUNT, &LENGTHS);
                receive_numbered(group, 1 - slot, COUNT, &LENGTHS);
                assert!(sent.iter().all(|sent| done(sent).error.is_none()));
                drop(sources);
            });
        }
    });
    assert!(groups.iter().all(|group| group.counters().bytes_buffered == 0));
}

#[test]
fn messages_survive_the_loss_of_another_rank() {
    const COUNT: i64 = 3000;
    let contexts = contexts(3);
    let mut groups = groups(&contexts, 3);
    let leaver = groups.pop().unwrap();
    thread::scope(|scope| {
        for (slot, group) in groups.iter().enumerate() {
            scope.spawn(move || {
                let (sources, sent) = send_numbered(group, 1 - slot, COUNT, &[1, 2]);
                receive_numbered(group, 1 - slot, COUNT, &[1, 2]);
                let is_taken = |sent: &Completion| done(sent).failed_slots.is_empty();
                assert!(sent.iter().all(is_taken));
                drop(sources);
            });
        }
        leaver.close();
    });
    let mut value = [0i64];
    let more = groups[1].receive(range(&mut value), Some(0), 0).unwrap();
    assert!(!more.wait(Duration::ZERO), "a message came twice");
}
