//! A master whose log hangs, and a client with more calls that wait for it than it has connections.

use std::{sync::Arc, time::Duration};

use mooncake_base::{ByteSize, Clock, SystemClock};
use mooncake_master::MasterConfig;
use mooncake_testkit::{Cluster, ClusterSettings, HangingDisk, until};

const TTL: Duration = Duration::from_secs(2);
const OBJECTS: usize = 200;
const THREADS: usize = 24;

#[test]
fn client_with_many_hanging_calls_does_not_expire() {
    let disk = Arc::new(HangingDisk::default());
    let settings = ClusterSettings {
        nodes: 1,
        segment_bytes: ByteSize::mib(16).bytes(),
        master: MasterConfig { client_ttl: TTL, ..MasterConfig::embedded() },
        disk: Some(disk.clone()),
        ..ClusterSettings::default()
    };
    let cluster = Cluster::start(settings).unwrap();
    let node = &cluster.nodes[0];
    for at in 0..OBJECTS {
        node.put(&format!("old{at}"), b"value").unwrap();
    }
    disk.hang(true);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || node.put(&format!("new{thread}"), b"value").unwrap());
        }
        until(Duration::from_secs(30), "a put waits for the log", || {
            disk.is_hanging().then_some(())
        });
        let end = SystemClock.now() + TTL * 3;
        until(Duration::from_secs(60), "the log hung for long", || {
            end.has_passed(SystemClock.now()).then_some(())
        });
        disk.hang(false);
    });
    let counters = cluster.totals().counters;
    assert_eq!(counters.clients_expired, 0);
    for at in 0..OBJECTS {
        let value = node.get(&format!("old{at}")).unwrap();
        assert_eq!(value.as_deref(), Some(&b"value"[..]), "old{at}");
    }
}
