//! A peer that runs as another user: shared memory is refused, TCP serves.

use std::{io, os::unix::process::CommandExt};

use mooncake_transfer_engine::{Opcode, TransportKind};

use crate::{
    child::{ChildPeer, program},
    pair::{held, move_one, runtime, soon, start},
};

/// The user `nobody`.
const OTHER_USER: u32 = 65_534;

/// Returns why a process of another user cannot be started.
pub(crate) fn missing() -> Option<String> {
    // SAFETY: reads the id of the user; cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        return Some("needs root, to start a process as another user".to_owned());
    }
    let failure = start_peer().err()?;
    Some(format!("needs a test program that user {OTHER_USER} may run: {failure}"))
}

pub(crate) fn reaches_a_peer_of_another_user_over_tcp() {
    let runtime = runtime();
    let near = start(None, &runtime);
    let child = start_peer().unwrap();
    let peer = near.open(&child.segment, soon()).unwrap();
    assert_eq!(peer.transport(), Some(TransportKind::Tcp));
    for address in [child.shared, child.user] {
        move_one(&near, &peer, Opcode::Write, (held(&mut [1; 9]), address)).unwrap();
    }
    let snapshot = near.snapshot();
    let shm = snapshot.transports.iter().find(|one| one.kind == TransportKind::Shm).unwrap();
    assert_eq!((shm.refusals, shm.batches), (1, 0));
    let refusals = &snapshot.peers[0].refusals;
    let why = &refusals.iter().find(|(kind, _)| *kind == TransportKind::Shm).unwrap().1;
    assert!(why.contains("another user"), "{why}");
}

fn start_peer() -> io::Result<ChildPeer> {
    ChildPeer::start_from(program().uid(OTHER_USER).gid(OTHER_USER))
}
