//! What keeps a client alive: any call, and a log that keeps the master from answering.

use std::sync::Arc;

use mooncake_base::clock::ManualClock;

use super::*;
use crate::{
    LogSync,
    journal::{Directory, Journal, Maintenance, hanging_disk::HangingDisk},
};

const SECOND: Duration = Duration::from_secs(1);

fn expired(service: &Service) -> u64 {
    service.advance();
    service.totals().counters.clients_expired
}

#[test]
fn client_that_calls_needs_no_heartbeat() {
    let clock = Arc::new(ManualClock::default());
    let service = Service::new(Rules::default(), clock.clone());
    let id = lend(&service);
    let connection = service.open_session(false);
    let probe = v1::ProbeRequest { caller: caller(id), ..Default::default() };
    for _ in 0..60 {
        clock.advance(SECOND);
        service.dispatch(
            v1::Request { call: Some(Call::Probe(probe.clone())), ..Default::default() },
            &connection,
        );
        assert_eq!(expired(&service), 0);
    }
    for _ in 0..60 {
        clock.advance(SECOND);
        // It has arrived, and waits.
        service.record_arrival(Some(&Call::Probe(probe.clone())), &connection);
        assert_eq!(expired(&service), 0);
    }
    for _ in 0..9 {
        clock.advance(SECOND);
        assert_eq!(expired(&service), 0);
    }
    clock.advance(SECOND);
    assert_eq!(expired(&service), 1, "a silent client expires");
}

/// Lets a client be silent while the log hangs for a minute of the master's clock.
fn hang(sync: LogSync) {
    let clock = Arc::new(ManualClock::default());
    let disk = Arc::new(HangingDisk::default());
    let opened = Journal::open(Directory::on(disk.clone()), sync).unwrap();
    let (service, _) = Service::from_log(Rules::default(), clock.clone(), opened);
    let service = Arc::new(service);
    let maintenance = Maintenance::start(&service).unwrap();
    let id = lend(&service);
    assert_eq!(expired(&service), 0);
    disk.hang(true);
    let other = service.clone();
    let put = std::thread::spawn(move || started(&other, put_start(id, &[("a", 1)])));
    while !disk.is_hanging() || service.totals().writing == 0 {
        std::thread::yield_now();
    }
    for _ in 0..60 {
        assert_eq!(expired(&service), 0, "{sync:?}");
        clock.advance(SECOND);
    }
    disk.hang(false);
    put.join().unwrap();
    while service.is_stalled(clock.now()) {
        std::thread::yield_now();
    }
    // The time before the stall still counts.
    assert_eq!(expired(&service), 0, "{sync:?}");
    for _ in 0..9 {
        clock.advance(SECOND);
        assert_eq!(expired(&service), 0, "{sync:?}");
    }
    clock.advance(SECOND);
    assert_eq!(expired(&service), 1, "{sync:?}");
    drop(maintenance);
}

#[test]
fn no_client_expires_for_the_time_in_which_the_log_hangs() {
    for sync in [LogSync::Always, LogSync::Interval(SECOND), LogSync::Never] {
        hang(sync);
    }
}
