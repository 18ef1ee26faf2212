//! Puts into a full pool over a log: they wait for one sync of the log, not for its interval.

use std::{net::TcpStream, time::Duration};

use mooncake_master::{LogSync, MasterConfig, config::StateDir};

use crate::support::{NativeClient, Running, whole_config};

const MIB: u64 = 1 << 20;

/// Starts a master with a full pool. The client that lends the memory stays connected.
fn full_pool(folder: &std::path::Path) -> (Running, NativeClient<TcpStream>) {
    let running = Running::new(MasterConfig {
        state_dir: StateDir::At(folder.join("state")),
        // No test waits for this.
        log_sync: LogSync::Interval(Duration::from_secs(3600)),
        client_ttl: Duration::from_secs(3600),
        ..whole_config()
    });
    let mut client = running.native();
    client.join("host-a:1", 64 * MIB);
    for index in 0..64 {
        client.put(&format!("old{index}"), MIB);
    }
    (running, client)
}

#[test]
fn put_into_full_pool_waits_for_one_sync() {
    let folder = tempfile::tempdir().unwrap();
    let (running, _lender) = full_pool(folder.path());
    let service = running.master().service();
    let syncs = service.journal_status().unwrap().syncs;
    let mut client = running.native();
    client.join("host-b:1", 4096);
    client.put("new", MIB);
    assert_eq!(service.journal_status().unwrap().syncs, syncs + 1);
    assert_eq!(service.totals().counters.evicted_keys, 1);
    // Bursts over the Unix socket are answered by a thread of their own.
    let mut client = running.unix();
    client.join("host-c:1", 4096);
    for index in 0..500 {
        client.put(&format!("burst{index}"), MIB);
    }
    let totals = service.totals();
    assert_eq!(totals.counters.puts_without_room, 0);
    // An eighth of a small pool may be evicted ahead, and as much be free.
    assert!(totals.keys >= 48, "{totals:?}");
}

#[test]
fn concurrent_puts_into_full_pool_share_syncs() {
    let folder = tempfile::tempdir().unwrap();
    let (running, _lender) = full_pool(folder.path());
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let running = &running;
            scope.spawn(move || {
                let mut client = running.native();
                client.join(&format!("host-{thread}:1"), 4096);
                for index in 0..100 {
                    client.put(&format!("new{thread}-{index}"), MIB / 8);
                }
            });
        }
    });
    let service = running.master().service();
    let status = service.journal_status().unwrap();
    assert!(status.syncs < 800 / 2, "800 puts took {} syncs", status.syncs);
    assert_eq!(service.totals().counters.puts_without_room, 0);
}
