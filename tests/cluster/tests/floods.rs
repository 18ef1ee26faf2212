//! Many connections that say nothing, to each socket that strangers can find: clients that work go on,
//! and new ones can join.

use std::time::{Duration, Instant};

use mooncake_cluster_tests::{
    MasterProcess, NodeProcess,
    listeners::{Listener, listeners},
};

/// The longest time that a call may take during a flood: far above that of a call, also on a busy
/// machine, and below the 5 s after which a server gives up on a silent connection.
const SERVED_WITHIN: Duration = Duration::from_secs(3);

/// The silent connections to one listener: twice those that a handshake socket serves at a time, and few enough for the descriptors of this process.
const CONNECTIONS: usize = 130;

/// Connects to each listener of a process.
fn flood(process: u32) -> (Vec<Listener>, Vec<impl Sized>) {
    let found = listeners(process).expect("the process runs");
    let connect = |listener: &Listener| listener.connect().expect("the listener accepts");
    let each = found.iter().flat_map(|listener| (0..CONNECTIONS).map(move |_| connect(listener)));
    let connections = each.collect();
    (found, connections)
}

/// Makes a request that is served in time, and returns the reply.
fn timed(node: &mut NodeProcess, command: &str) -> String {
    let begin = Instant::now();
    let reply = node.request(command);
    let took = begin.elapsed();
    assert!(took < SERVED_WITHIN, "{command}: {took:?}");
    reply
}

fn check_flood(flags: &[&str]) {
    let user_flags: Vec<_> = flags.iter().copied().chain(["--no-segment"]).collect();
    let master = MasterProcess::start("127.0.0.1:0", &[]);
    let mut holder = NodeProcess::start(&master.address, flags);
    let mut known = NodeProcess::start(&master.address, &user_flags);
    assert_eq!(timed(&mut holder, "fill kept 100000 1"), "stored 1");
    assert_eq!(timed(&mut known, "version kept"), "1");
    let (of_master, _to_master) = flood(master.id());
    let (of_holder, _to_holder) = flood(holder.id());
    // The master's ports for calls and for operators, and its Unix socket; the holder's ports for the
    // handshake and for data, and the socket of attachments to shared memory.
    assert!(of_master.len() >= 3, "{of_master:?}");
    assert!(of_holder.len() >= 2, "{of_holder:?}");
    let is_attached = of_holder.iter().any(Listener::is_unix);
    assert_eq!(is_attached, !flags.contains(&"--tcp"), "{of_holder:?}");
    assert_eq!(timed(&mut known, "version kept"), "1");
    assert_eq!(timed(&mut known, "fill more 100000 1"), "stored 1");
    // The first read of a new client opens the holder's engine by its handshake socket.
    let mut new = NodeProcess::start(&master.address, &user_flags);
    assert_eq!(timed(&mut new, "version kept"), "1");
    assert_eq!(timed(&mut new, "version more"), "1");
}

#[test]
fn silent_connections_delay_no_client_over_tcp() {
    check_flood(&["--tcp"]);
}

#[test]
fn silent_connections_delay_no_client_over_shm() {
    check_flood(&[]);
}
