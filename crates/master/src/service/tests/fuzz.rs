//! Random calls of every kind, by clients that come, stall, leave and expire, over a log from which
//! the master restarts. Nothing panics, every call is answered, and every answer can be read.
//!
//! `PROPTEST_CASES` sets the number of runs.

use std::sync::Arc;

use mooncake_base::{clock::ManualClock, random::SplitMix64};

use super::*;
use crate::{
    LogSync,
    journal::{Directory, Maintenance, hanging_disk::HangingDisk},
    state::{Image, OffloadRules},
};

const STEPS: usize = 250;
const CLIENTS: usize = 4;
/// More objects than one slice of a sweep looks at.
const MANY: usize = 5000;

/// What earlier answers named.
#[derive(Debug, Default)]
struct Known {
    /// By client.
    puts: [Vec<(Bytes, u64)>; CLIENTS],
    replicas: Vec<u64>,
    tasks: Vec<(Bytes, u64)>,
    jobs: Vec<Bytes>,
    /// Key, version and length.
    offloads: Vec<(Bytes, u64, u64)>,
    /// Replicas that promotions were to write.
    promoted: Vec<u64>,
    fences: Vec<v1::FenceRelease>,
}

struct Fuzzer {
    random: SplitMix64,
    clock: Arc<ManualClock>,
    disk: Arc<HangingDisk>,
    service: Arc<Service>,
    maintenance: Option<Maintenance<Service>>,
    log_sync: LogSync,
    origins: Vec<Origin>,
    known: Known,
    /// The keys of the last call that started puts.
    started: Vec<Bytes>,
    sequence: u64,
}

impl Fuzzer {
    fn new(seed: u64) -> Self {
        let (clock, disk) = (Arc::new(ManualClock::default()), Arc::new(HangingDisk::default()));
        let mut fuzzer = Self {
            random: SplitMix64::new(seed),
            service: Arc::new(Service::new(Rules::default(), clock.clone())),
            clock,
            disk,
            maintenance: None,
            log_sync: match seed % 2 {
                0 => LogSync::Never,
                _ => LogSync::Interval(Duration::from_millis(20)),
            },
            origins: Vec::new(),
            known: Known::default(),
            started: Vec::new(),
            sequence: 0,
        };
        fuzzer.start();
        fuzzer
    }

    fn start(&mut self) {
        let opened = Journal::open(Directory::on(self.disk.clone()), self.log_sync).unwrap();
        let offload = OffloadRules {
            queue_max: 50,
            adopts_records: self.one_in(2),
            is_on_eviction: self.one_in(2),
            drops_when_full: self.one_in(2),
            moves_max: 10,
        };
        let rules = Rules {
            is_multi_tenant: self.one_in(3),
            offload: (!self.one_in(4)).then_some(offload),
            ..Rules::default()
        };
        let (service, _) = Service::from_log(rules, self.clock.clone(), opened);
        self.service = Arc::new(service);
        self.maintenance = Some(Maintenance::start(&self.service).unwrap());
        self.origins = (0..CLIENTS).map(|_| self.service.open_session(false)).collect();
        for client in 0..CLIENTS {
            if !self.one_in(4) {
                self.come_back(client);
            }
        }
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.random.number() % limit.max(1) as u64) as usize
    }

    fn one_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    /// Chooses one of the last things of a list, if it is not empty.
    fn pick(&mut self, length: usize) -> Option<usize> {
        let recent = length.min(12);
        (recent > 0 && !self.one_in(8)).then(|| length - 1 - self.below(recent))
    }

    /// A number that is small, or at an edge, or arbitrary.
    fn number(&mut self) -> u64 {
        match self.below(6) {
            0 => 0,
            1 => u64::MAX - self.below(2) as u64,
            2 => self.random.number(),
            3 => 1 << self.below(64),
            _ => self.below(2000) as u64,
        }
    }

    fn step(&mut self) {
        match self.below(40) {
            0 => self.clock.advance(Duration::from_millis(self.random.number() % 30_000)),
            1..=4 => self.clock.advance(Duration::from_millis(self.random.number() % 300)),
            5..=12 => {
                self.service.advance();
            }
            13 => {
                let client = self.below(CLIENTS);
                let ends = [ConnectionEnd::ByPeer, ConnectionEnd::Unknown, ConnectionEnd::ByMaster];
                let end = ends[self.below(3)];
                let fresh = self.service.open_session(false);
                let old = std::mem::replace(&mut self.origins[client], fresh);
                self.service.close_session(&old, end);
            }
            14 if self.one_in(4) => self.restart(),
            17 => self.leave(),
            18 | 19 => {
                let client = self.below(CLIENTS);
                self.come_back(client);
            }
            15 => self.take_snapshot(),
            16 => self.show(),
            _ => self.make_call(),
        }
        self.service.take_expired_clients();
    }

    fn restart(&mut self) {
        self.maintenance = None;
        if self.one_in(3) {
            self.disk.lose_power();
        }
        self.start();
    }

    /// A client leaves, and others call before its objects are swept.
    fn leave(&mut self) {
        let client = self.below(CLIENTS);
        let caller = self.caller(client);
        self.dispatch(client, Call::Unregister(v1::UnregisterRequest { caller }));
        for _ in 0..4 {
            self.make_call();
        }
    }

    /// A client registers and announces its memory, or lends it anew.
    fn come_back(&mut self, client: usize) {
        let register = self.register(client);
        self.dispatch(client, Call::Register(v1::RegisterRequest { log_mark: None, ..register }));
        for resume in [true, false] {
            let segments = vec![v1::Segment { length: 1 << 19, ..self.segment(client) }];
            let (caller, sequence, is_all) = (self.caller(client), 0, false);
            let mount = v1::MountRequest { caller, segments, resume, sequence, is_all };
            self.dispatch(client, Call::Mount(mount));
        }
    }

    /// Encodes a snapshot in slices, with calls in between, and reads it.
    fn take_snapshot(&mut self) {
        let (mut image, mut bytes) = (Image::default(), Vec::new());
        let now = self.service.now();
        let mut cursor = self.service.shared.lock().begin_snapshot(now, &mut bytes);
        while !self.service.shared.lock().snapshot_slice(&mut cursor, 64, &mut bytes) {
            self.make_call();
        }
        image.replay(&bytes).unwrap();
    }

    /// What operators look at.
    fn show(&mut self) {
        let (service, key) = (&self.service, b"k1");
        service.segments();
        service.memory_use();
        let _ = service.view_object("", key);
        service.work(10);
        service.totals();
        let mut next = Some(0);
        while let Some(from) = next {
            next = service.walk(from, &mut |_, _| {});
        }
    }

    fn make_call(&mut self) {
        let client = self.below(CLIENTS);
        let call = self.call(client);
        self.dispatch(client, call);
    }

    fn dispatch(&mut self, client: usize, call: Call) {
        let (call_number, answered_below) =
            if self.one_in(3) { (self.below(50) as u64, self.below(50) as u64) } else { (0, 0) };
        let picked = self.pick(self.known.fences.len());
        let fence = if picked.is_some() && self.one_in(4) { picked } else { None };
        let released_fences = fence.map(|at| self.known.fences[at].clone()).into_iter().collect();
        let request = v1::Request {
            call: Some(call),
            call_number,
            answered_below,
            released_fences,
            ..v1::Request::default()
        };
        let answer = self.service.dispatch(request, &self.origins[client]);
        let bytes = answer.encode_to_vec();
        assert!(bytes.len() <= mooncake_proto::native_frame::FRAME_BYTES_MAX);
        assert_eq!(v1::Response::decode(&bytes[..]).as_ref(), Ok(&answer));
        match answer.call.expect("every call has an answer") {
            response::Call::Failure(failure) => {
                assert_ne!(failure.code, ErrorCode::INTERNAL_ERROR.number(), "{failure:?}");
            }
            answer => self.learn(client, &answer),
        }
    }

    fn learn(&mut self, client: usize, answer: &response::Call) {
        match answer {
            response::Call::PutStart(answer) => {
                let columns = answer.columns.as_ref().expect("columns");
                let keys = std::mem::take(&mut self.started);
                let versions = columns.versions.iter().copied();
                let puts = keys.into_iter().zip(versions).filter(|(_, version)| *version != 0);
                self.known.puts[client].extend(puts);
                self.known.replicas.extend(&columns.places.as_ref().expect("places").replicas);
            }
            response::Call::Locate(answer) => {
                self.known.fences.extend(answer.fences().map(|(fence, version, object)| {
                    let (versions, objects) = (vec![version], vec![object]);
                    v1::FenceRelease { fence, versions, objects }
                }));
            }
            response::Call::CreateTasks(answer) => {
                let tasks = answer.results.iter().map(|result| (result.task.clone(), 1));
                self.known.tasks.extend(tasks);
            }
            response::Call::FetchTasks(answer) => {
                let tasks = answer.tasks.iter().map(|work| (work.task.clone(), work.attempt));
                self.known.tasks.extend(tasks);
            }
            response::Call::FetchOffloads(answer) => {
                let records = answer.records.as_ref().expect("columns");
                let offloads = records.read().expect("columns that match").map(|record| {
                    (Bytes::copy_from_slice(record.key), record.version, record.length)
                });
                self.known.offloads.extend(offloads);
                let places = answer.promotion_places.as_ref();
                self.known.promoted.extend(places.into_iter().flat_map(|it| &it.replicas));
            }
            response::Call::CreateDrainJobs(answer) => {
                self.known.jobs.extend(answer.results.iter().map(|result| result.job.clone()));
            }
            _ => {}
        }
    }
}

/// Random calls.
impl Fuzzer {
    fn call(&mut self, client: usize) -> Call {
        let caller = self.caller(client);
        match self.below(52) {
            0..=2 => Call::Register(self.register(client)),
            3 | 4 => {
                let registration = self.below(3) as u64;
                Call::Heartbeat(v1::HeartbeatRequest { caller, registration })
            }
            5 => Call::Unregister(v1::UnregisterRequest { caller }),
            6..=9 => Call::Mount(self.mount(client)),
            10 => Call::Unmount(self.unmount(client)),
            11..=19 => Call::PutStart(self.put_start(client)),
            20..=25 => {
                let columns = Some(self.put_refs(client));
                if self.one_in(6) {
                    Call::PutRevoke(v1::PutRevokeRequest { caller, columns })
                } else {
                    Call::PutEnd(v1::PutEndRequest { caller, columns })
                }
            }
            26..=28 => {
                let keys = Some(v1::KeyColumn::pack(self.keys()));
                let (lease, fence) = (self.one_in(2), self.one_in(2));
                let tag = if self.one_in(2) { "t".to_owned() } else { String::new() };
                Call::Locate(v1::LocateRequest { caller, keys, lease, fence, tag })
            }
            29 => Call::Verify(v1::VerifyRequest { caller, reads: self.reads() }),
            30 => Call::Probe(v1::ProbeRequest {
                caller,
                keys: self.keys(),
                lease: self.one_in(2),
                suffixes: vec![Bytes::from_static(b"1"); self.below(10)],
                prefetched: (0..self.below(6) as u32).collect(),
            }),
            31..=33 => Call::Describe(v1::DescribeRequest { caller, keys: self.keys() }),
            34 => {
                let ttl_ms = self.one_in(2).then(|| self.number());
                Call::SetExpiry(v1::SetExpiryRequest { caller, keys: self.keys(), ttl_ms })
            }
            35 => {
                let if_versions = if self.one_in(4) { vec![self.number()] } else { vec![] };
                Call::Remove(v1::RemoveRequest {
                    caller,
                    keys: self.keys(),
                    force: self.one_in(2),
                    if_versions,
                    spare_hard_pinned: self.one_in(2),
                })
            }
            36 => Call::RemoveMatching(v1::RemoveMatchingRequest {
                caller,
                selector: self.selector(),
                force: self.one_in(2),
                spare_hard_pinned: self.one_in(2),
            }),
            37 => {
                let (selector, after, limit) = (self.selector(), self.key(), self.below(9) as u32);
                Call::ListObjects(v1::ListObjectsRequest { caller, selector, after, limit })
            }
            38 => Call::ListSegments(v1::ListSegmentsRequest { caller }),
            39 => Call::Status(v1::StatusRequest { caller }),
            40..=43 => self.disk_call(client),
            _ => self.work_call(client),
        }
    }

    /// Calls about disks, of which there are two.
    fn disk_call(&mut self, client: usize) -> Call {
        let caller = self.caller(client);
        let number = self.below(2) as u8;
        let disk = Bytes::from(vec![200 + number; 16]);
        match self.below(8) {
            0 | 1 => {
                let segment = v1::Segment {
                    id: disk,
                    incarnation: self.below(4) as u64,
                    name: format!("h:{client}"),
                    endpoint: format!("h:9{number}"),
                    length: 1 << 20,
                    kind: v1::SegmentKind::Disk.into(),
                    ..v1::Segment::default()
                };
                let (used, reports_all) = (self.number(), self.one_in(2));
                Call::MountDisk(v1::MountDiskRequest {
                    caller,
                    disk: Some(segment),
                    used,
                    reports_all,
                })
            }
            2 if self.one_in(3) => {
                let forget = self.one_in(2);
                Call::UnmountDisk(v1::UnmountDiskRequest { caller, disk, forget })
            }
            2..=4 => {
                let (limit, bytes, wait_ms) = (self.below(9) as u32, self.number(), 0);
                Call::FetchOffloads(v1::FetchOffloadsRequest {
                    caller,
                    disk,
                    limit,
                    bytes,
                    wait_ms,
                    promotion_bytes: self.number(),
                })
            }
            _ => {
                let (added, dropped) = (self.records(client), self.records(client));
                let refused = self.records(client);
                let (used, is_complete) = (self.number(), self.one_in(2));
                let promoted = (0..self.below(3)).map(|_| self.promoted_replica()).collect();
                let not_promoted = (0..self.below(2)).map(|_| self.promoted_replica()).collect();
                Call::ReportRecords(v1::ReportRecordsRequest {
                    caller,
                    disk,
                    added: Some(added),
                    dropped: self.one_in(3).then_some(dropped),
                    refused: self.one_in(3).then_some(refused),
                    used,
                    is_complete,
                    promoted,
                    not_promoted,
                })
            }
        }
    }

    /// Records of objects that exist, for the most part: of those that were handed over.
    fn records(&mut self, client: usize) -> v1::RecordColumns {
        let count = self.below(4);
        let picked: Vec<_> =
            (0..count).filter_map(|_| self.pick(self.known.offloads.len())).collect();
        let mut records: Vec<(Bytes, u64, u64)> =
            picked.into_iter().map(|at| self.known.offloads[at].clone()).collect();
        if self.one_in(4) {
            records.push((self.key(), self.number(), client as u64));
        }
        v1::RecordColumns {
            keys: Some(v1::KeyColumn::pack(records.iter().map(|(key, ..)| key.clone()))),
            tenants: vec![self.tenant()],
            versions: records.iter().map(|(_, version, _)| *version).collect(),
            lengths: records.iter().map(|(.., length)| *length).collect(),
        }
    }

    /// Calls about tasks, drains and quotas.
    fn work_call(&mut self, client: usize) -> Call {
        let caller = self.caller(client);
        let task = self.pick(self.known.tasks.len()).map(|at| self.known.tasks[at].clone());
        let (task, attempt) = task.unwrap_or((Bytes::from_static(b"task"), 9));
        let job = self.pick(self.known.jobs.len()).map(|at| self.known.jobs[at].clone());
        let jobs = vec![job.unwrap_or(Bytes::from_static(b"job"))];
        match self.below(10) {
            0 | 1 => {
                let (key, source) = (self.key(), self.name());
                let kind = if self.one_in(2) { v1::TaskKind::Copy } else { v1::TaskKind::Move };
                let targets = vec![self.name()];
                let tasks = vec![v1::NewTask { kind: kind.into(), key, source, targets }];
                Call::CreateTasks(v1::CreateTasksRequest { caller, tasks })
            }
            2 => Call::QueryTasks(v1::QueryTasksRequest { caller, tasks: vec![task] }),
            3 | 4 => {
                let (limit, bytes) = (self.below(9) as u32, self.number());
                Call::FetchTasks(v1::FetchTasksRequest { caller, limit, bytes })
            }
            5 => {
                let failed_replicas = if self.one_in(3) { vec![self.replica()] } else { vec![] };
                let reason = String::new();
                let ends = vec![v1::TaskEnd { task, attempt, failed_replicas, reason }];
                Call::EndTasks(v1::EndTasksRequest { caller, ends })
            }
            6 => {
                let (keys, segment) = (self.keys(), self.name());
                Call::ClearReplicas(v1::ClearReplicasRequest { caller, keys, segment })
            }
            7 => {
                let targets = if self.one_in(2) { vec![self.name()] } else { vec![] };
                let job = v1::NewDrainJob {
                    segments: vec![self.name()],
                    targets,
                    concurrency: self.below(3) as u32,
                    allow_eviction: self.one_in(2),
                };
                Call::CreateDrainJobs(v1::CreateDrainJobsRequest { caller, jobs: vec![job] })
            }
            8 if self.one_in(2) => Call::QueryDrainJobs(v1::QueryDrainJobsRequest { caller, jobs }),
            8 => Call::CancelDrainJobs(v1::CancelDrainJobsRequest { caller, jobs }),
            _ => {
                let tenant = self.tenant();
                let bytes = self.one_in(2).then(|| self.number());
                let quotas = vec![v1::Quota { tenant, bytes }];
                if self.one_in(2) {
                    Call::SetQuotas(v1::SetQuotasRequest { caller, quotas })
                } else {
                    Call::QueryQuotas(v1::QueryQuotasRequest { caller, tenants: vec![] })
                }
            }
        }
    }

    fn caller(&mut self, client: usize) -> Option<v1::Caller> {
        if self.one_in(60) {
            return None;
        }
        let id = ClientId::from_bits(1 + client as u128);
        Some(v1::Caller { client: Bytes::copy_from_slice(&id.to_bytes()), tenant: self.tenant() })
    }

    fn tenant(&mut self) -> String {
        if self.one_in(10) { "t".to_owned() } else { String::new() }
    }

    fn key(&mut self) -> Bytes {
        match self.below(30) {
            0 => Bytes::new(),
            1 => Bytes::from(vec![0xff; 70_000]),
            _ => Bytes::from(format!("k{}", self.below(24))),
        }
    }

    fn keys(&mut self) -> Vec<Bytes> {
        (0..self.below(5)).map(|_| self.key()).collect()
    }

    /// The name of a segment: that of its client.
    fn name(&mut self) -> String {
        format!("h:{}", self.below(CLIENTS + 1))
    }

    fn replica(&mut self) -> u64 {
        let known = self.pick(self.known.replicas.len()).map(|at| self.known.replicas[at]);
        known.unwrap_or_else(|| self.number())
    }

    fn promoted_replica(&mut self) -> u64 {
        let known = self.pick(self.known.promoted.len()).map(|at| self.known.promoted[at]);
        known.unwrap_or_else(|| self.replica())
    }

    fn register(&mut self, client: usize) -> v1::RegisterRequest {
        let log_mark = self.one_in(12).then(|| v1::LogMark {
            master: self.number(),
            timeline: match self.service.shared.log_mark() {
                Some(own) => own.timeline,
                None => 0,
            },
            synced_frame: self.number(),
        });
        let (caller, wants_offload) = (self.caller(client), self.one_in(2));
        let name = format!("h:{client}");
        v1::RegisterRequest { caller, name, wants_offload, log_mark, ..Default::default() }
    }

    fn segment(&mut self, client: usize) -> v1::Segment {
        let number = self.below(3);
        let length = if self.one_in(10) { self.number() } else { 1 << (12 + self.below(8)) };
        let name = if self.one_in(20) { self.name() } else { format!("h:{client}") };
        v1::Segment {
            id: Bytes::from(vec![(client * 3 + number) as u8; 16]),
            incarnation: self.below(3) as u64,
            endpoint: name.clone(),
            name,
            base: (1 + number as u64) << 32,
            length,
            protocol: "tcp".to_owned(),
            kind: v1::SegmentKind::Memory.into(),
        }
    }

    fn sequence(&mut self) -> u64 {
        self.sequence += 1;
        if self.one_in(4) { self.number() } else { self.sequence }
    }

    fn mount(&mut self, client: usize) -> v1::MountRequest {
        v1::MountRequest {
            caller: self.caller(client),
            segments: (0..self.below(3)).map(|_| self.segment(client)).collect(),
            resume: self.one_in(3),
            sequence: self.sequence(),
            is_all: self.one_in(6),
        }
    }

    fn unmount(&mut self, client: usize) -> v1::UnmountRequest {
        v1::UnmountRequest {
            caller: self.caller(client),
            segments: vec![self.segment(client).id],
            grace_period_ms: if self.one_in(3) { self.number() } else { 0 },
            sequence: self.sequence(),
        }
    }

    fn put_start(&mut self, client: usize) -> v1::PutStartRequest {
        let keys = if self.one_in(400) {
            (0..MANY).map(|i| Bytes::from(format!("m{i}"))).collect()
        } else {
            self.keys()
        };
        self.started = keys;
        let length = match self.below(12) {
            0 => self.number(),
            1 => 1 << 18,
            _ => 1 + self.below(5000) as u64,
        };
        let groups = if self.one_in(4) {
            self.started.iter().map(|_| "g".to_owned()).collect()
        } else {
            vec![]
        };
        let config = v1::ReplicateConfig {
            replica_num: self.below(4) as u32,
            soft_pin: self.below(4) as i32,
            soft_pin_ttl_ms: self.one_in(4).then(|| self.number()),
            with_hard_pin: self.one_in(10),
            preferred_segments: if self.one_in(4) { vec![self.name()] } else { vec![] },
            prefer_same_node: self.one_in(8),
            ttl_ms: self.one_in(4).then(|| self.below(5000) as u64),
            ..Default::default()
        };
        let columns = v1::PutColumns {
            keys: Some(v1::KeyColumn::pack(&self.started)),
            lengths: vec![length],
            groups,
            if_versions: if self.one_in(8) { vec![self.number()] } else { vec![] },
        };
        v1::PutStartRequest {
            caller: self.caller(client),
            config: Some(config),
            replace: self.one_in(2),
            request_id: if self.one_in(2) { self.below(9) as u64 } else { 0 },
            columns: Some(columns),
            avoided_endpoints: if self.one_in(6) { vec![self.name()] } else { vec![] },
            if_absent: self.one_in(12).then(|| v1::KeyColumn::pack(self.keys())),
            absent_suffixes: if self.one_in(4) {
                vec![Bytes::from_static(b"1"); self.below(10)]
            } else {
                vec![]
            },
        }
    }

    fn put_refs(&mut self, client: usize) -> v1::PutRefColumns {
        // Sometimes those of another client.
        let client = if self.one_in(8) { self.below(CLIENTS) } else { client };
        let puts: Vec<_> = if self.one_in(4) {
            let known = &mut self.known.puts[client];
            known.split_off(known.len().saturating_sub(MANY))
        } else {
            (0..self.below(4)).map(|_| self.known_put(client)).collect()
        };
        let is_failed = self.one_in(5) && !puts.is_empty();
        let is_late = self.one_in(5) && !puts.is_empty();
        v1::PutRefColumns {
            late_items: if is_late { vec![0] } else { vec![] },
            late_replicas: if is_late { vec![self.replica()] } else { vec![] },
            versions: puts.iter().map(|put| put.1).collect(),
            checksums: None,
            failed_items: if is_failed { vec![0] } else { vec![] },
            failed_replicas: if is_failed { vec![self.replica()] } else { vec![] },
            keys: self.one_in(2).then(|| v1::KeyColumn::pack(puts.iter().map(|put| &put.0[..]))),
        }
    }

    fn known_put(&mut self, client: usize) -> (Bytes, u64) {
        let known = self.pick(self.known.puts[client].len());
        let known = known.map(|at| self.known.puts[client][at].clone());
        known.unwrap_or_else(|| (self.key(), self.number()))
    }

    fn reads(&mut self) -> Vec<v1::ReadRef> {
        let client = self.below(CLIENTS);
        let (_, version) = self.known_put(client);
        vec![v1::ReadRef { key: self.key(), version, replica: self.replica() }]
    }

    fn selector(&mut self) -> Option<v1::KeySelector> {
        use v1::key_selector::By;
        let by = match self.below(5) {
            0 => None,
            1 => Some(By::All(self.one_in(2))),
            2 => Some(By::Regex("k[0-9]*5$".to_owned())),
            3 => Some(By::Regex("(".to_owned())),
            _ => Some(By::Prefix(Bytes::from_static(b"k1"))),
        };
        Some(v1::KeySelector { by })
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        max_shrink_iters: 0,
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_calls_never_panic(seed in any::<u64>()) {
        let mut fuzzer = Fuzzer::new(seed);
        for _ in 0..STEPS {
            fuzzer.step();
        }
    }
}
