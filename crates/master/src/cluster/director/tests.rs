//! Tests of the thread of a member: the process ends if the thread or those that it needs end.

use mooncake_base::{
    Moment,
    sync::{Condvar, Mutex},
};
use mooncake_election::{
    Acquisition, Bid, Change, Hold, InSyncSet, Lease, SimulatedService, Snapshot,
    rules::{Answer, Request},
};
use tokio::time::timeout;

use super::*;
use crate::addresses::Addresses;

const TTL: Duration = Duration::from_secs(1);

/// The call of the lease service that panics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// A call of the thread of the member.
    Announce,
    /// A call of a thread of the election.
    Acquire,
}

/// A lease service in memory of which one call panics.
#[derive(Debug)]
struct FaultyService {
    fault: Fault,
    service: Mutex<SimulatedService>,
    is_closed: Mutex<bool>,
    closed: Condvar,
}

impl FaultyService {
    fn carry_out(&self, request: &Request) -> Answer {
        self.service.lock().carry_out(request, SystemClock.now())
    }

    fn panic_at(&self, fault: Fault) {
        assert!(self.fault != fault, "planted");
    }
}

impl LeaseService for FaultyService {
    fn address(&self) -> String {
        "memory".to_owned()
    }

    fn read(&self, _: Moment) -> Result<Snapshot> {
        Ok(self.service.lock().snapshot(SystemClock.now()))
    }

    fn acquire(&self, bid: &Bid, _: Moment) -> Result<Acquisition> {
        self.panic_at(Fault::Acquire);
        match self.carry_out(&Request::Acquire(bid.clone())) {
            Answer::Acquisition(acquisition) => Ok(acquisition),
            other => {
                Err(Error::internal("not an acquisition").with("answer", format!("{other:?}")))
            }
        }
    }

    fn renew(&self, lease: &Lease, _: Moment) -> Result<Hold> {
        match self.carry_out(&Request::Renew(*lease)) {
            Answer::Hold(hold) => Ok(hold),
            other => Err(Error::internal("not a renewal").with("answer", format!("{other:?}"))),
        }
    }

    fn announce(&self, lease: &Lease, address: &str, _: Moment) -> Result<Hold> {
        self.panic_at(Fault::Announce);
        Ok(self.service.lock().announce(lease, address, SystemClock.now()))
    }

    fn change_in_sync(&self, change: &Change, _: Moment) -> Result<Hold> {
        Ok(self.service.lock().change(change, SystemClock.now()))
    }

    fn mark_lost(&self, lost: &InSyncSet, _: Moment) -> Result<()> {
        self.carry_out(&Request::MarkLost(lost.clone()));
        Ok(())
    }

    fn release(&self, lease: &Lease, _: Moment) -> Result<()> {
        self.carry_out(&Request::Release(*lease));
        Ok(())
    }

    fn watch(&self, _: &Snapshot, deadline: Moment) -> Result<Snapshot> {
        let mut is_closed = self.is_closed.lock();
        while !*is_closed && !deadline.has_passed(SystemClock.now()) {
            self.closed.wait_for(&mut is_closed, deadline.left(SystemClock.now()));
        }
        Ok(self.service.lock().snapshot(SystemClock.now()))
    }

    fn close(&self) {
        *self.is_closed.lock() = true;
        self.closed.notify_all();
    }
}

/// A member that is elected ends with an error, and its lease is given back.
async fn check(fault: Fault) {
    let folder = tempfile::tempdir().unwrap();
    let directory = Arc::new(Directory::lock(folder.path()).unwrap());
    let member = Membership::open(Arc::clone(&directory)).unwrap();
    let mut service = SimulatedService::new(TTL);
    service.set_in_sync(InSyncSet::founded_by(&MemberId::new(member.member()).unwrap()));
    let service = Arc::new(FaultyService {
        fault,
        service: Mutex::new(service),
        is_closed: Mutex::default(),
        closed: Condvar::new(),
    });
    let mut config = MasterConfig::embedded();
    config.cluster.lease_ttl = TTL;
    let rpc = ([127, 0, 0, 1], 1).into();
    let addresses = Addresses { rpc, admin: None, metadata: None, events: None };
    let front = Front::new(config, SystemClock::shared(), addresses, "".into(), None);
    let lease_service = Arc::clone(&service) as Arc<dyn LeaseService>;
    let address = "127.0.0.1:1".to_owned();
    let front = Arc::new(front);
    let director = Director::start_with(lease_service, Arc::clone(&front), directory, address);
    let director = director.unwrap();
    let error = timeout(Duration::from_secs(20), director.cluster().ended()).await;
    let error = error.expect("the process ends");
    assert!(error.to_string().contains("panicked"), "{error}");
    let end = tokio::task::spawn_blocking(|| drop(director));
    end.await.unwrap();
    front.kill();
    drop(front);
    let leader = service.service.lock().snapshot(SystemClock.now()).leader;
    assert!(leader.is_none(), "the lease is given back: {leader:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn panic_of_a_members_thread_ends_the_process() {
    check(Fault::Announce).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn panic_of_an_elections_thread_ends_the_process() {
    check(Fault::Acquire).await;
}
