//! A child that is forked while a directory is open: it has none of the threads, and shares the files.
#![allow(unsafe_code, reason = "the test forks")]

use std::io::{Read as _, Write as _};

use mooncake_disk::{Disk, Name, Options, Read, ReadMethod, ReadOutcome, Write, WriteOutcome};

const NAME: Name<'_> = Name { tenant: "default", key: b"key", version: 1 };

fn read(disk: &Disk) -> ReadOutcome {
    disk.read(&mut [Read { name: NAME, into: &mut [0; 7] }]).remove(0)
}

/// Runs a function in a forked child, and returns whether it said so.
fn in_child(run: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child runs this thread only, which holds no lock, and leaves without unwinding.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_good = run();
        // SAFETY: ends the child without the handlers of the parent.
        unsafe { libc::_exit(i32::from(!is_good)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child above, and writes to a number of ours.
    let ended = unsafe { libc::waitpid(child, &raw mut status, 0) };
    ended == child && libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}

#[test]
fn forked_child_is_refused_and_harms_nothing() {
    for read_method in [ReadMethod::Probe, ReadMethod::Threads] {
        let folder = tempfile::tempdir().unwrap();
        let options = Options { read_method, ..Options::new(16 << 20) };
        let disk = Disk::open(folder.path(), options.clone()).unwrap();
        disk.write(&[Write { name: NAME, payload: b"payload" }]);
        assert_eq!(read(&disk), ReadOutcome::Good);
        // `Some` so that the child can close it, which waits for no thread and gives up no lock.
        let mut disk = Some(disk);
        let is_refused = in_child(|| {
            let Some(disk) = disk.take() else { return false };
            let name = Name { version: 2, ..NAME };
            let write = disk.write(&[Write { name, payload: b"of the child" }]);
            let is_refused = matches!(read(&disk), ReadOutcome::Failed(_))
                && matches!(write.outcomes[..], [WriteOutcome::Failed(_)]);
            is_refused && disk.close().is_ok()
        });
        assert!(is_refused);
        let disk = disk.expect("only the child has closed it");
        assert_eq!(read(&disk), ReadOutcome::Good);
        // The child has not sealed the extent: records go on behind the first.
        disk.write(&[Write { name: Name { version: 3, ..NAME }, payload: b"more" }]);
        assert_eq!(disk.length(Name { version: 3, ..NAME }), Some(4));
        assert!(Disk::open(folder.path(), options.clone()).is_err(), "the parent has the lock");
        drop(disk);
        let disk = Disk::open(folder.path(), options).unwrap();
        assert_eq!(disk.length(Name { version: 3, ..NAME }), Some(4));
    }
}

#[test]
fn orphan_of_a_dead_owner_does_not_hold_the_lock() {
    let folder = tempfile::tempdir().unwrap();
    let open = || Disk::open(folder.path(), Options::new(16 << 20));
    // The orphan lives until the second pipe is closed.
    let (mut started, mut start) = std::io::pipe().unwrap();
    let (mut life, lives) = std::io::pipe().unwrap();
    let mut lives = Some(lives);
    let is_good = in_child(|| {
        let Ok(disk) = open() else { return false };
        // SAFETY: the child runs this thread only, which holds no lock, and leaves without unwinding.
        let orphan = unsafe { libc::fork() };
        if orphan == 0 {
            drop(lives.take());
            let is_told = start.write_all(b"x").is_ok();
            let is_over = life.read(&mut [0]).is_ok_and(|count| count == 0);
            // SAFETY: ends the process without the handlers of its parents.
            unsafe { libc::_exit(i32::from(!(is_told && is_over))) };
        }
        // As if it was killed: nothing is closed.
        std::mem::forget(disk);
        orphan > 0
    });
    assert!(is_good);
    started.read_exact(&mut [0]).unwrap();
    open().expect("the owner is dead");
    drop(lives);
}
