//! Confirmations of a standby over a connection that several threads share.

use std::{
    collections::BTreeSet,
    sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender},
    thread,
    time::Duration,
};

use mooncake_base::Error;

use super::{
    super::{
        confirmations::{ConfirmationSource, Confirmations, StandbyProgress},
        followers::{DirectSender, FollowerId, Newcomer, Sent, Shipment},
    },
    *,
};

/// What a standby that has received everything at once confirms.
#[derive(Debug)]
struct Connection {
    confirm: SyncSender<StandbyProgress>,
    is_silent: bool,
}

impl DirectSender for Connection {
    fn try_send(&self, shipment: &Shipment) -> Sent {
        let confirmation = StandbyProgress { position: shipment.position, next_frame: 1 };
        if !self.is_silent {
            // The reader is gone when a test ends.
            let _ = self.confirm.send(confirmation);
        }
        Sent::Whole
    }
}

#[derive(Debug)]
struct Arriving(Receiver<StandbyProgress>);

impl ConfirmationSource for Arriving {
    fn receive(&mut self) -> Result<StandbyProgress> {
        self.0.recv().map_err(|_| Error::closed("the standby has gone"))
    }

    fn receive_within(&mut self, time: Duration) -> Result<Option<StandbyProgress>> {
        match self.0.recv_timeout(time) {
            Ok(confirmation) => Ok(Some(confirmation)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(Error::closed("the standby has gone")),
        }
    }
}

/// Attaches a standby without which nothing is answered.
fn attach(journal: &Journal, is_silent: bool) -> (FollowerId, Arc<Confirmations>) {
    let standby = Newcomer { member: "s", address: "", level: level::RecordLevel::PRESENT };
    let mut source = journal.catch_up(1);
    let (id, position) = loop {
        if let Some(attached) = source.next(&standby).unwrap().attached {
            break attached;
        }
    };
    source.end();
    let (confirm, confirmed) = mpsc::sync_channel(1 << 16);
    confirm.send(StandbyProgress { position, next_frame: 1 }).unwrap();
    let confirmations = Arc::new(Confirmations::new(id, Arriving(confirmed)));
    let shared = Arc::clone(&confirmations);
    let connection = Connection { confirm, is_silent };
    journal.followers().share_connection(id, Arc::new(connection), shared);
    journal.require_standbys(&BTreeSet::from(["s".to_owned()]));
    (id, confirmations)
}

#[test]
fn thread_that_waits_reads_the_confirmation_itself() {
    let folder = tempfile::tempdir().unwrap();
    let leader = Pool::open(folder.path());
    let _connection = attach(leader.journal(), false);
    // No other thread is there to read it.
    leader.put("key");
    assert!(leader.journal().is_durable(leader.journal().appended()));
}

/// A wake-up that is missed would be made up for after [`RECHECK`](super::super::confirmations::RECHECK),
/// which is longer than this test may take.
#[test]
fn threads_and_tasks_wait_at_the_same_time() {
    const CHANGES: u32 = 300;
    let folder = tempfile::tempdir().unwrap();
    let leader = Pool::open(folder.path());
    let journal = leader.journal();
    let (id, confirmations) = attach(journal, false);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    thread::scope(|scope| {
        let own = scope.spawn(|| confirmations.read_all(journal));
        let writer = scope.spawn(|| {
            loop {
                if journal.write_requests.wait(Duration::from_secs(1)) == request::Wake::Stopped {
                    break;
                }
                journal.write_only();
            }
        });
        let waiting: Vec<_> = (0..3)
            .map(|thread| {
                let leader = &leader;
                scope.spawn(move || {
                    for change in 0..CHANGES {
                        leader.put(&format!("{thread}-{change}"));
                    }
                })
            })
            .collect();
        runtime.block_on(async {
            for change in 0..CHANGES {
                let position = leader.append(|state| start_put(state, &format!("task-{change}"))).1;
                journal.durable(position).await.unwrap();
            }
        });
        for thread in waiting {
            thread.join().unwrap();
        }
        journal.write_requests.stop();
        writer.join().unwrap();
        // The standby goes: the thread of the connection says so.
        journal.followers().detach(id);
        own.join().unwrap().unwrap_err();
    });
}

#[test]
fn standby_that_goes_keeps_nobody_reading() {
    let folder = tempfile::tempdir().unwrap();
    let leader = Pool::open(folder.path());
    let journal = leader.journal();
    let (id, confirmations) = attach(journal, true);
    thread::scope(|scope| {
        let position = leader.append(|state| start_put(state, "unconfirmed")).1;
        let waiting = scope.spawn(move || journal.wait_durable(position));
        journal.followers().detach(id);
        confirmations.read_all(journal).unwrap_err();
        journal.set_stuck(Some(Error::closed("no standby")));
        while !waiting.is_finished() {
            thread::yield_now();
        }
        // It attaches again, and still lacks the change.
        journal.set_stuck(None);
        assert!(waiting.join().unwrap().is_err());
    });
}
