//! Many connections that say nothing, to each port that strangers can find: clients that work go on,
//! and new ones can join.

use std::{
    net::TcpStream,
    time::{Duration, Instant},
};

use mooncake_cluster_tests::{MasterProcess, NodeProcess};

/// The longest wait for a reply of a node.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

/// The longest time that a call may take during a flood: far above that of a call, also on a busy
/// machine, and below the 5 s after which a server gives up on a silent connection.
const SERVED_WITHIN: Duration = Duration::from_secs(3);

/// The silent connections to one port: several times those that a handshake socket serves at a time,
/// and few enough for the descriptors of this process.
const CONNECTIONS: usize = 250;

fn flood(address: &str) -> Vec<TcpStream> {
    (0..CONNECTIONS).map(|_| TcpStream::connect(address).expect("the port accepts")).collect()
}

/// Makes a request that is served in time, and returns the reply.
fn timed(node: &mut NodeProcess, command: &str) -> String {
    let begin = Instant::now();
    let reply = node.request(command, REPLY_TIMEOUT).expect("a reply");
    let took = begin.elapsed();
    assert!(took < SERVED_WITHIN, "{command}: {took:?}");
    reply
}

#[test]
fn silent_connections_keep_no_client_waiting() {
    let master = MasterProcess::start("127.0.0.1:0", &[]);
    let mut holder = NodeProcess::start(&master.address, &["--tcp"]);
    let mut known = NodeProcess::start(&master.address, &["--tcp", "--no-segment"]);
    assert_eq!(timed(&mut holder, "fill kept 100000 1"), "stored 1");
    assert_eq!(timed(&mut known, "version kept"), "1");
    let name = timed(&mut holder, "name");
    let _floods = [flood(&master.address), flood(&name)];
    assert_eq!(timed(&mut known, "version kept"), "1");
    assert_eq!(timed(&mut known, "fill more 100000 1"), "stored 1");
    // The first read of a new client opens the holder's engine by its handshake socket.
    let mut new = NodeProcess::start(&master.address, &["--tcp", "--no-segment"]);
    assert_eq!(timed(&mut new, "version kept"), "1");
    assert_eq!(timed(&mut new, "version more"), "1");
}
