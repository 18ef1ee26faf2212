//! Clients, engines and a master in one process: the guarantees of puts and reads, also when calls,
//! copies and masters are lost.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use mooncake_base::{ErrorCode, ErrorKind, KeyBatch, Result};
use mooncake_proto::v1::{request::Call, response::Call as Answer};
use mooncake_store_client::{
    ClientConfig, FoundKeys, ObjectStatus, ProbeTerms, PutItem, PutOptions, PutOutcome, Read,
    Selector, Span,
};
use mooncake_testkit::{
    Cluster, ClusterSettings, Fault, Gate, Node, Random,
    cluster::{key, range},
    until,
};

const LIMIT: Duration = Duration::from_secs(20);

fn cluster(nodes: usize) -> Cluster {
    Cluster::start(ClusterSettings { nodes, ..ClusterSettings::default() })
        .expect("a cluster of one process starts")
}

fn upsert() -> PutOptions {
    PutOptions { is_upsert: true, ..PutOptions::default() }
}

fn lender() -> ClientConfig {
    ClientConfig { segment_bytes: 16 << 20, ..ClientConfig::default() }
}

fn code<T: std::fmt::Debug>(outcome: Result<T>) -> ErrorCode {
    outcome.expect_err("it must fail").code()
}

/// Starts a node whose fences have already expired when granted, while the switch is on.
fn late_node(cluster: &Cluster) -> (Node, Arc<AtomicBool>) {
    let switch = Arc::new(AtomicBool::new(true));
    let is_on = Arc::clone(&switch);
    let link = cluster.tampering_link(move |response| {
        if let Some(Answer::Locate(located)) = &mut response.call
            && is_on.load(Ordering::SeqCst)
        {
            located.fence_ms = 0;
        }
    });
    (cluster.join_by(lender(), link).expect("the node joins"), switch)
}

#[test]
fn object_is_readable_until_removed() {
    let cluster = cluster(2);
    let [a, b] = &cluster.nodes[..] else { panic!() };
    let mut random = Random::new();
    for length in [1, 100, 4097, 3_000_000] {
        let name = format!("k{length}");
        let value = random.bytes(length);
        assert!(matches!(a.put(&name, &value).unwrap(), PutOutcome::Stored { replicas: 1, .. }));
        assert_eq!(b.put(&name, b"other").unwrap(), PutOutcome::Existed);
        assert_eq!(b.get(&name).unwrap().as_deref(), Some(&value[..]));
        let status = b.client.exists(&[key(&name)], ProbeTerms::default()).remove(0).unwrap();
        assert_eq!(status, Some(ObjectStatus::Complete { length: length as u64 }));
        a.client.remove(&[key(&name)], true).remove(0).unwrap();
        assert_eq!(a.get(&name).unwrap(), None);
        assert_eq!(
            code(a.client.remove(&[key(&name)], true).remove(0)),
            ErrorCode::OBJECT_NOT_FOUND
        );
    }
    assert_eq!(code(a.put("empty", b"")), ErrorCode::INVALID_PARAMS);
}

#[test]
fn splits_a_batch_larger_than_a_message() {
    let cluster = cluster(1);
    let client = &cluster.nodes[0].client;
    let keys: Vec<_> = (0..9000).map(|i| key(&format!("key {i}"))).collect();
    let reservations = client.reserve(
        &keys.iter().map(|key| (key.clone(), 16)).collect::<Vec<_>>(),
        &PutOptions::default(),
    );
    let reservations: Vec<_> = reservations.into_iter().map(|r| r.unwrap().unwrap()).collect();
    assert!(reservations.iter().zip(&keys).all(|(r, key)| r.key() == key));
    assert!(
        client
            .exists(&keys, ProbeTerms::default())
            .iter()
            .all(|s| *s.as_ref().unwrap() == Some(ObjectStatus::Writing))
    );
    let mut batch = KeyBatch::default();
    keys.iter().for_each(|key| batch.push(key.as_bytes()));
    let presence = client.presence(batch, ProbeTerms::default());
    assert!(presence.failure.is_none(), "{presence:?}");
    assert_eq!(presence.found, [Some(false); 9000], "what is being written is not there yet");
    assert!(client.revoke(reservations).iter().all(Result::is_ok));
    assert!(
        client.exists(&keys, ProbeTerms::default()).iter().all(|s| s.as_ref().unwrap().is_none())
    );
}

/// Finds the same with a master that knows suffixes, and with an older one, which ignores them.
#[test]
fn finds_keys_with_suffixes_where_there_is_none_without() {
    let cluster = cluster(1);
    let (node, is_new) = (&cluster.nodes[0], Arc::new(AtomicBool::new(true)));
    let probes = Arc::new(AtomicU32::new(0));
    let (switch, count) = (Arc::clone(&is_new), Arc::clone(&probes));
    let link = cluster.tampering_link(move |response| {
        if let Some(Answer::Probe(found)) = &mut response.call {
            count.fetch_add(1, Ordering::SeqCst);
            if !switch.load(Ordering::SeqCst) {
                found.found_suffixes.clear();
            }
        }
    });
    let reader = cluster.join_by(ClientConfig::default(), link).expect("the node joins");
    for name in ["whole", "whole-a", "parts-b", "both-a", "both-b"] {
        node.put(name, b"value").unwrap();
    }
    let long = "l".repeat(64 << 10);
    let keys = ["whole", "parts", "both", "none", &long].map(key);
    let found = |is_there, suffixes| FoundKeys { is_there, suffixes };
    let expected =
        [found(true, 0), found(false, 2), found(false, 3), found(false, 0), found(false, 0)];
    for (is_new_master, calls) in [(true, 1), (false, 2)] {
        is_new.store(is_new_master, Ordering::SeqCst);
        probes.store(0, Ordering::SeqCst);
        let answers = reader.client.exists_or_suffixed(&keys, &["-a", "-b"]);
        let answers: Vec<_> = answers.into_iter().map(Result::unwrap).collect();
        assert_eq!(answers, expected, "is_new_master={is_new_master}");
        assert_eq!(probes.load(Ordering::SeqCst), calls, "is_new_master={is_new_master}");
    }
    probes.store(0, Ordering::SeqCst);
    let answers = reader.client.exists_or_suffixed(&keys[..1], &["-a"]);
    assert_eq!(answers[0].as_ref().unwrap(), &found(true, 0));
    assert_eq!(probes.load(Ordering::SeqCst), 1, "an object that is there costs one call");
    for wrong in [vec!["-"; 9], vec![&long[..65]]] {
        let refused = reader.client.exists_or_suffixed(&keys[..1], &wrong).remove(0);
        assert_eq!(code(refused), ErrorCode::INVALID_PARAMS);
    }
}

#[test]
fn batch_items_have_their_own_bytes_and_outcomes() {
    const COUNT: usize = 5000;
    let cluster = cluster(2);
    let [writer, reader] = &cluster.nodes[..] else { panic!() };
    let name = |at: usize| format!("key {at}");
    let is_there_before = |at: usize| at.is_multiple_of(700);
    let is_empty = |at: usize| at % 900 == 1;
    for at in (0..COUNT).filter(|&at| is_there_before(at)) {
        writer.put(&name(at), b"first").unwrap();
    }
    let memory = writer.engine().allocate(COUNT as u64 * 8).unwrap();
    let bytes: Vec<u8> = (0..COUNT as u64).flat_map(u64::to_le_bytes).collect();
    memory.write(0, &bytes).unwrap();
    let parts: Vec<_> =
        (0..COUNT).map(|at| [range(&memory, at * 8, if is_empty(at) { 0 } else { 8 })]).collect();
    let keys: Vec<_> = (0..COUNT).map(|at| key(&name(at))).collect();
    let items: Vec<_> =
        (0..COUNT).map(|at| PutItem { key: (&keys[at]).into(), parts: &parts[at] }).collect();
    let outcomes = writer.client.put(&items, &PutOptions::default());
    assert_eq!(outcomes.len(), COUNT);
    for (at, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Err(error) => {
                assert!(is_empty(at), "{at}: {error}");
                assert!(error.to_string().ends_with(&format!("{:?}", name(at))), "{error}");
            }
            Ok(PutOutcome::Existed) => assert!(is_there_before(at), "{at}"),
            Ok(PutOutcome::Stored { .. }) => assert!(!is_there_before(at) && !is_empty(at), "{at}"),
        }
    }
    for at in (0..COUNT).step_by(97).chain([0, 1, 700, COUNT - 1]) {
        let expected = match at {
            at if is_empty(at) => None,
            at if is_there_before(at) => Some(b"first".to_vec()),
            at => Some((at as u64).to_le_bytes().to_vec()),
        };
        assert_eq!(reader.get(&name(at)).unwrap(), expected, "{at}");
    }
}

#[test]
fn repeated_key_in_a_batch_is_put_in_order() {
    let cluster = cluster(1);
    let node = &cluster.nodes[0];
    node.put("source", b"one").unwrap();
    let memory = node.engine().allocate(4096).unwrap();
    memory.write(0, b"onetwo").unwrap();
    // The same memory twice, with two lengths, which distinguish the two puts.
    let key = key("k");
    let item = |parts| PutItem { key: (&key).into(), parts };
    let (one, two) = ([range(&memory, 0, 3)], [range(&memory, 0, 6)]);
    let kept = node.client.put(&[item(&one), item(&two)], &PutOptions::default());
    assert!(
        matches!(kept[..], [Ok(PutOutcome::Stored { .. }), Ok(PutOutcome::Existed)]),
        "{kept:?}"
    );
    assert_eq!(node.get("k").unwrap().unwrap(), b"one");
    let replaced = node.client.put(&[item(&one), item(&two)], &upsert());
    assert!(replaced.iter().all(Result::is_ok), "{replaced:?}");
    assert_eq!(node.get("k").unwrap().unwrap(), b"onetwo");
}

#[test]
fn late_read_of_an_unchanged_object_is_valid() {
    let cluster = cluster(0);
    let (node, _) = late_node(&cluster);
    node.put("k", b"value").unwrap();
    assert_eq!(node.get("k").unwrap().unwrap(), b"value");
    assert_eq!(node.client.metrics().late_reads, 1);
}

#[test]
fn late_read_of_a_removed_object_is_discarded() {
    let cluster = cluster(0);
    let (node, _) = late_node(&cluster);
    node.put("k", b"value").unwrap();
    let located = node.client.locate(&[key("k")]).remove(0).unwrap();
    node.client.remove(&[key("k")], true).remove(0).unwrap();
    let memory = node.engine().allocate(4096).unwrap();
    let read = Read::whole(&located, &[]);
    assert_eq!(code(node.client.read(&[read]).remove(0)), ErrorCode::INVALID_PARAMS);
    let into = [range(&memory, 0, 4096)];
    let read = Read::whole(&located, &into);
    assert_eq!(code(node.client.read(&[read]).remove(0)), ErrorCode::OBJECT_NOT_FOUND);
    node.put("k", b"VALUE").unwrap();
    let read = Read::whole(&located, &into);
    let outcome = node.client.read(&[read]).remove(0);
    let mut bytes = [0; 5];
    memory.read(0, &mut bytes).unwrap();
    match outcome {
        Ok(length) => assert_eq!((length, &bytes), (5, b"VALUE"), "the newer one or nothing"),
        Err(error) => assert_eq!(error.code(), ErrorCode::LEASE_EXPIRED),
    }
}

#[test]
fn small_destination_error_names_both_sizes() {
    let cluster = cluster(1);
    let node = &cluster.nodes[0];
    node.put("k", &[7; 1000]).unwrap();
    let located = node.client.locate(&[key("k")]).remove(0).unwrap();
    let memory = node.engine().allocate(4096).unwrap();
    let read =
        |span, into: &[_]| node.client.read(&[Read { located: &located, span, into }]).remove(0);
    let error = read(Span::Whole, &[range(&memory, 0, 999)]).unwrap_err();
    assert_eq!(error.code(), ErrorCode::INVALID_PARAMS);
    assert!(error.to_string().contains("999") && error.to_string().contains("1000"), "{error}");
    let scattered = [range(&memory, 0, 500), range(&memory, 2000, 500), range(&memory, 3000, 9)];
    assert_eq!(read(Span::Whole, &scattered).unwrap(), 1000);
    let part = Span::Range { offset: 990, length: 10 };
    assert_eq!(read(part, &[range(&memory, 0, 10)]).unwrap(), 10);
    let outside = Span::Range { offset: 990, length: 11 };
    assert_eq!(code(read(outside, &[range(&memory, 0, 11)])), ErrorCode::INVALID_PARAMS);
}

#[test]
fn put_after_its_window_leaves_nothing_behind() {
    let cluster = cluster(1);
    let link = cluster.tampering_link(|response| match &mut response.call {
        Some(Answer::PutStart(started)) => started.write_window_ms = 0,
        Some(Answer::PutRenew(renewed)) => renewed.write_window_ms = 0,
        _ => {}
    });
    let late = cluster.join_by(ClientConfig::default(), link).unwrap();
    assert_eq!(code(late.put("k", b"late")), ErrorCode::WRITE_FAIL);
    assert_eq!(cluster.nodes[0].get("k").unwrap(), None);
    cluster.nodes[0].put("k", b"again").unwrap();
    assert_eq!(cluster.nodes[0].get("k").unwrap().unwrap(), b"again");
}

const WINDOW_MS: u64 = 600;

/// A node that writes in rounds of 1 MiB of an object, with the number of its renewals. Each write
/// window is half over when its answer arrives, so that every round asks for another one.
#[allow(clippy::disallowed_methods, reason = "an answer that takes half of its window is the case")]
fn node_with_short_windows(cluster: &Cluster) -> (Node, Arc<AtomicU32>) {
    let renewals = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&renewals);
    let link = cluster.tampering_link(move |response| {
        match &mut response.call {
            Some(Answer::PutStart(started)) => started.write_window_ms = WINDOW_MS,
            Some(Answer::PutRenew(renewed)) => {
                renewed.write_window_ms = WINDOW_MS;
                counted.fetch_add(1, Ordering::SeqCst);
            }
            _ => return,
        }
        std::thread::sleep(Duration::from_millis(WINDOW_MS / 2 + 20));
    });
    let config = ClientConfig { round_bytes: 1 << 20, ..ClientConfig::default() };
    (cluster.join_by(config, link).expect("the node joins"), renewals)
}

/// Returns the copies that a node has moved, and their bytes.
fn moved(node: &Node) -> (u64, u64) {
    let counts = node.client.metrics();
    let copies = counts.by_transport.values().map(|count| count.total());
    copies.fold((0, 0), |(done, bytes), copy| (done + copy.done, bytes + copy.bytes))
}

#[test]
fn put_longer_than_its_window_is_renewed() {
    let cluster = cluster(1);
    let (writer, renewals) = node_with_short_windows(&cluster);
    let value = Random::new().bytes((4 << 20) + 7);
    let begin = Instant::now();
    writer.put("k", &value).unwrap();
    assert!(begin.elapsed() > Duration::from_millis(2 * WINDOW_MS));
    assert!(renewals.load(Ordering::SeqCst) >= 4);
    assert_eq!(writer.get("k").unwrap().unwrap(), value, "read in rounds, too");
    assert_eq!(moved(&writer), (2, 2 * value.len() as u64), "a put and a read of one copy each");
}

#[test]
fn batch_longer_than_its_window_is_renewed() {
    const LENGTH: usize = 1 << 20;
    const COUNT: usize = 14;
    let cluster = cluster(1);
    let (writer, renewals) = node_with_short_windows(&cluster);
    let value = Random::new().bytes(COUNT * LENGTH);
    let memory = writer.engine().allocate((COUNT * LENGTH) as u64).unwrap();
    memory.write(0, &value).unwrap();
    let keys: Vec<_> = (0..COUNT).map(|at| key(&format!("k{at}"))).collect();
    let parts: Vec<_> = (0..COUNT).map(|at| [range(&memory, at * LENGTH, LENGTH)]).collect();
    let items: Vec<_> =
        (0..COUNT).map(|at| PutItem { key: (&keys[at]).into(), parts: &parts[at] }).collect();
    for outcome in writer.client.put(&items, &PutOptions::default()) {
        outcome.unwrap();
    }
    assert!(renewals.load(Ordering::SeqCst) >= 3, "a round has 4 MiB of a batch");
    memory.write(0, &vec![0; COUNT * LENGTH]).unwrap();
    let located: Vec<_> =
        writer.client.locate(&keys).into_iter().map(|found| found.unwrap()).collect();
    let reads: Vec<_> = (0..COUNT).map(|at| Read::whole(&located[at], &parts[at])).collect();
    for outcome in writer.client.read(&reads) {
        assert_eq!(outcome.unwrap(), LENGTH as u64);
    }
    let mut read = vec![0; COUNT * LENGTH];
    memory.read(0, &mut read).unwrap();
    assert!(read == value, "the bytes differ");
    assert_eq!(moved(&writer), (2 * COUNT as u64, 2 * value.len() as u64));
}

#[test]
fn inconsistent_response_columns_fail_the_call() {
    let cluster = cluster(1);
    cluster.nodes[0].put("k", b"here").unwrap();
    let spoils: [fn(&mut Answer); 3] = [
        |answer| match answer {
            Answer::Locate(located) => located.columns.as_mut().unwrap().versions.clear(),
            Answer::PutStart(started) => started.columns.as_mut().unwrap().versions.push(7),
            _ => {}
        },
        |answer| match answer {
            Answer::Locate(located) => located.columns.as_mut().unwrap().lengths.clear(),
            Answer::PutEnd(ended) => ended.columns.as_mut().unwrap().items = 2,
            _ => {}
        },
        |answer| match answer {
            Answer::Locate(located) => located.columns = None,
            Answer::PutEnd(ended) => ended.columns = None,
            _ => {}
        },
    ];
    for (number, spoil) in spoils.into_iter().enumerate() {
        let link = cluster.tampering_link(move |response| {
            response.call.iter_mut().for_each(spoil);
        });
        let node = cluster.join_by(ClientConfig::default(), link).unwrap();
        assert_eq!(code(node.get("k")), ErrorCode::RPC_FAIL, "{number}");
        assert_eq!(code(node.put(&format!("k{number}"), b"new")), ErrorCode::RPC_FAIL, "{number}");
    }
    assert_eq!(cluster.nodes[0].get("k").unwrap().unwrap(), b"here");
}

#[test]
fn read_falls_back_to_another_copy() {
    let cluster = cluster(3);
    let options = PutOptions { replicas: 2, ..PutOptions::default() };
    let value = Random::new().bytes(3_000_000);
    let stored = cluster.nodes[0].client.put_bytes(&key("k"), &value, &options).unwrap();
    assert!(matches!(stored, PutOutcome::Stored { replicas: 2, .. }));
    let reader = cluster.join(0).unwrap();
    let located = reader.client.locate(&[key("k")]).remove(0).unwrap();
    let lost = &located.places()[0].segment.endpoint;
    let holder = cluster.nodes.iter().find(|node| node.engine().segment_name() == lost).unwrap();
    // The master still considers the process alive, but its memory cannot be read any more.
    holder.engine().close(mooncake_base::Moment::default());
    for _ in 0..2 {
        assert_eq!(reader.get("k").unwrap().unwrap(), value);
    }
}

#[test]
fn next_put_registers_again_with_a_restarted_master() {
    let mut cluster = cluster(1);
    cluster.nodes[0].put("before", b"1").unwrap();
    let mounted = cluster.nodes[0].client.mounted();
    cluster.start_master().unwrap();
    let node = &cluster.nodes[0];
    until(LIMIT, "a put succeeds", || node.put("after", b"2").ok());
    assert_eq!(node.get("after").unwrap().unwrap(), b"2");
    let segments = node.client.segments().unwrap();
    assert_eq!(segments.iter().map(|s| s.segment.id).collect::<Vec<_>>(), node.client.mounted());
    assert_ne!(node.client.mounted(), mounted, "others may still know of the old memory");
}

#[test]
fn lost_end_of_a_put_is_sent_again() {
    let cluster = cluster(1);
    let node = &cluster.nodes[0];
    for (name, fault) in [("answer", Fault::LoseAnswer), ("request", Fault::LoseRequest)] {
        node.link.inject(3, fault, |call| matches!(call, Call::PutEnd(_)));
        assert!(matches!(
            node.put(name, b"whole").unwrap(),
            PutOutcome::Stored { replicas: 1, .. }
        ));
        assert_eq!(node.get(name).unwrap().unwrap(), b"whole");
    }
}

#[test]
fn close_does_not_wait_for_a_hanging_master() {
    let cluster = cluster(1);
    let node = &cluster.nodes[0];
    let gate = Gate::new();
    node.link.inject(usize::MAX, Fault::Hold(gate.clone()), |_| true);
    let start = Instant::now();
    node.client.close();
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    node.client.close();
    gate.open();
    assert_eq!(node.get("k").unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(node.put("k", b"v").unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(node.client.health().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(node.client.mount(4096).unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn segments_can_be_mounted_and_unmounted() {
    let cluster = cluster(1);
    let node = cluster
        .join_with(ClientConfig { segment_bytes_max: 8 << 20, ..ClientConfig::default() })
        .unwrap();
    assert_eq!(node.client.segments().unwrap().len(), 1);
    let mounted = node.client.mount(20 << 20).unwrap();
    assert_eq!(mounted.len(), 3, "cut at the largest size");
    assert_eq!(node.client.segments().unwrap().len(), 4);
    for segment in &mounted {
        node.client.unmount(*segment, Duration::ZERO).unwrap();
    }
    assert_eq!(code(node.client.unmount(mounted[0], Duration::ZERO)), ErrorCode::SEGMENT_NOT_FOUND);
    assert_eq!(node.client.segments().unwrap().len(), 1);
}

#[test]
fn unanswered_unmount_leaves_no_segment_in_doubt() {
    let cluster = cluster(0);
    let config = ClientConfig {
        segment_bytes: 8 << 20,
        rpc_timeout: Duration::from_secs(1),
        ..ClientConfig::default()
    };
    let node = cluster.join_with(config).unwrap();
    let segment = node.client.mounted()[0];
    node.link.inject(usize::MAX, Fault::LoseAnswer, |call| matches!(call, Call::Unmount(_)));
    let error = node.client.unmount(segment, Duration::ZERO).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    // The master has dropped the segment. The client lends fresh memory in its place.
    until(LIMIT, "master and client agree about the segments", || {
        let known: Vec<_> = node.client.segments().ok()?.iter().map(|s| s.segment.id).collect();
        (known == node.client.mounted() && known.len() == 1).then_some(())
    });
    assert_ne!(node.client.mounted(), [segment]);
}

#[test]
fn lists_and_removes_objects_by_key_selector() {
    let cluster = cluster(1);
    let node = &cluster.nodes[0];
    for name in ["a/1", "a/2", "b/1"] {
        node.put(name, b"x").unwrap();
    }
    let page = node.client.list(&Selector::Prefix(b"a/".to_vec()), None, 1).unwrap();
    assert_eq!((page.objects[0].key.clone(), page.is_last), (key("a/1"), false));
    let page = node.client.list(&Selector::Prefix(b"a/".to_vec()), Some(&key("a/1")), 0).unwrap();
    assert_eq!((page.objects.len(), page.is_last), (1, true));
    assert_eq!(node.client.remove_matching(&Selector::Regex("/1$".into()), false).unwrap(), 2);
    assert_eq!(node.client.remove_matching(&Selector::All, false).unwrap(), 1);
    assert_eq!(
        code(node.client.remove_matching(&Selector::Regex("(".into()), false)),
        ErrorCode::INVALID_PARAMS
    );
}

#[test]
fn put_waits_for_fenced_memory() {
    let cluster = cluster(0);
    let node = cluster.join(16 << 20).unwrap();
    let value = vec![1; 10 << 20];
    node.put("old", &value).unwrap();
    assert_eq!(code(node.put("new", &vec![2; 17 << 20])), ErrorCode::NO_AVAILABLE_HANDLE);
    let located = node.client.locate(&[key("old")]).remove(0).unwrap();
    node.client.remove(&[key("old")], true).remove(0).unwrap();
    // The memory is not reused until the fence of that read expires; then the put continues.
    assert!(matches!(node.put("new", &value).unwrap(), PutOutcome::Stored { replicas: 1, .. }));
    assert_eq!(node.get("new").unwrap().unwrap(), value);
    drop(located);
}

#[test]
fn upsert_without_free_memory_keeps_the_old_value() {
    let cluster = cluster(0);
    let node = cluster.join(16 << 20).unwrap();
    node.put("k", b"old").unwrap();
    let too_much = vec![2; 17 << 20];
    let outcome = node.client.put_bytes(&key("k"), &too_much, &upsert());
    assert_eq!(code(outcome), ErrorCode::NO_AVAILABLE_HANDLE);
    assert_eq!(node.get("k").unwrap().unwrap(), b"old");
}

#[test]
fn reads_rotate_over_copies_and_prefer_the_own_copy() {
    let settings = ClusterSettings { nodes: 2, ..ClusterSettings::default() };
    let cluster = Cluster::start(settings).unwrap();
    let reader_node = ClientConfig { segment_bytes: 0, ..ClientConfig::default() };
    let reader_node = cluster.join_with(reader_node).unwrap();
    let options = PutOptions { replicas: 2, ..PutOptions::default() };
    let stored = reader_node.client.put_bytes(&key("k"), &[7; 4096], &options).unwrap();
    assert!(matches!(stored, PutOutcome::Stored { replicas: 2, .. }));
    for _ in 0..20 {
        assert_eq!(reader_node.get("k").unwrap().unwrap(), [7; 4096]);
        assert_eq!(cluster.nodes[0].get("k").unwrap().unwrap(), [7; 4096]);
    }
    let reads_from = |reader: &Node, holder: &Node| -> u64 {
        let peers = reader.client.engine().snapshot().peers;
        let name = holder.client.engine().segment_name();
        let of = peers.iter().filter(|peer| peer.name == name).flat_map(|peer| &peer.transports);
        of.map(|way| way.bytes_read / 4096).sum()
    };
    let [a, b] = [0, 1].map(|at| reads_from(&reader_node, &cluster.nodes[at]));
    assert_eq!(a + b, 20);
    // A preempted reader may measure one copy as slow, but not from the first reads on.
    assert!(a >= 4 && b >= 4, "{a} and {b}");
    assert_eq!(reads_from(&cluster.nodes[0], &cluster.nodes[0]), 20);
    assert_eq!(reads_from(&cluster.nodes[0], &cluster.nodes[1]), 0);
}
