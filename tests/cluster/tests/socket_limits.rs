//! More silent connections than the sockets of a holder serve at a time: clients that work go on, and
//! new ones can join. Ignored where a process may not open enough files.

use std::process::ExitCode;

use libtest_mimic::Arguments;
use mooncake_base::requirement::trial;
use mooncake_cluster_tests::{
    MasterProcess, NodeProcess,
    listeners::{Listener, listeners},
};
use mooncake_os::rlimit;
use socket2::Socket;

/// More than the data port serves at a time: 8,192.
const DATA_CONNECTIONS: usize = 8512;

/// More than peers attach to shared memory: 4,096.
const ATTACHMENTS: usize = 4512;

/// The files that a process needs for other purposes.
const OTHER_FILES: usize = 500;

/// Silent connections end after 5 s, so many threads open them at a time.
const THREADS: usize = 8;

fn main() -> ExitCode {
    rlimit::raise();
    let needed = DATA_CONNECTIONS + OTHER_FILES;
    let is_missing = rlimit::limit() < needed as u64;
    let missing = is_missing.then(|| format!("needs {needed} open files per process"));
    let tests = vec![
        trial(missing.clone(), "full_data_port_refuses_no_client", fill_data_port),
        trial(missing, "full_attachment_socket_refuses_no_client", fill_attachment_socket),
    ];
    libtest_mimic::run(&Arguments::from_args(), tests).exit_code()
}

fn fill_data_port() {
    // The name of a node is the address of its handshake socket. The other port is that of data.
    let is_data = |listener: &Listener, name: &str| {
        listener.port().is_some_and(|port| !name.ends_with(&format!(":{port}")))
    };
    check_full(&["--tcp"], is_data, DATA_CONNECTIONS);
}

fn fill_attachment_socket() {
    check_full(&[], |listener, _| listener.is_unix(), ATTACHMENTS);
}

/// Fills the socket of a holder that `is_filled` selects, and uses the holder.
fn check_full(flags: &[&str], is_filled: fn(&Listener, &str) -> bool, connections: usize) {
    let user_flags: Vec<_> = flags.iter().copied().chain(["--no-segment"]).collect();
    let master = MasterProcess::start("127.0.0.1:0", &[]);
    let mut holder = NodeProcess::start(&master.address, flags);
    let mut known = NodeProcess::start(&master.address, &user_flags);
    holder.expect_reply("fill kept 100000 1", "stored 1");
    known.expect_reply("version kept", "1");
    let name = holder.request("name");
    let found = listeners(holder.id()).expect("the holder runs");
    let filled: Vec<_> = found.iter().filter(|listener| is_filled(listener, &name)).collect();
    let [filled] = filled[..] else { panic!("one listener: {found:?}") };
    let open = connect_all(filled, connections);
    known.expect_reply("version kept", "1");
    let mut new = NodeProcess::start(&master.address, &user_flags);
    new.expect_reply("version kept", "1");
    new.expect_reply("fill more 100000 1", "stored 1");
    known.expect_reply("version more", "1");
    assert_eq!(open.len(), connections);
}

fn connect_all(listener: &Listener, connections: usize) -> Vec<Socket> {
    let connect = || listener.connect().expect("the listener accepts");
    let connect_some = || (0..connections / THREADS).map(|_| connect()).collect::<Vec<_>>();
    std::thread::scope(|scope| {
        let threads = [(); THREADS].map(|()| scope.spawn(connect_some));
        threads.into_iter().flat_map(|thread| thread.join().expect("connected")).collect()
    })
}
