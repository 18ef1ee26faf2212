//! A link to whichever master leads: the first of a list that answers, or the one that a lease service
//! names.

use std::{
    fmt,
    sync::{Arc, OnceLock},
    time::Duration,
};

use mooncake_base::{
    Clock, Endpoint, Error, ErrorCode, ErrorKind, Moment, Result, SystemClock,
    sync::{Condvar, Mutex},
};
use mooncake_election::{
    ClusterId, LeaderAddress, LeaseService, Snapshot, View, etcd::EtcdLease,
    kubernetes::KubernetesLease, redis::RedisLease,
};
use mooncake_os::threads::Threads;
use mooncake_proto::v1;

use super::{
    CallFailure, LeaderChange, MasterLink, SocketLink, pool, socket::DEFAULT_PORT,
    view_fence::ViewFence,
};
use crate::{config::LinkConfig, master_address::MasterAddress, protocol::AttemptFailure};

/// Time that the first call waits for a leader.
const FIRST_WAIT: Duration = Duration::from_secs(30);

/// Time that a later call waits for a leader before it counts as failed and may be repeated; and the
/// interval at which the service is asked while calls fail.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Duration of one watch. A connection that a firewall has forgotten is noticed after it.
const WATCH_WINDOW: Duration = Duration::from_secs(30);

/// Time limit of a question to the service while calls fail.
const READ_TIMEOUT: Duration = Duration::from_secs(2);

/// Only a master's own lease has a duration; for clients any will do.
const ANY_TTL: Duration = Duration::from_secs(5);

/// A link that follows the leader.
#[derive(Debug)]
pub struct LocatedLink {
    shared: Arc<LeaderLocator>,
    /// The one that watches the service, if one names the leader.
    threads: Threads,
}

struct LeaderLocator {
    address: MasterAddress,
    config: LinkConfig,
    source: Source,
    state: Mutex<LocatorState>,
    /// The state has changed.
    changed: Condvar,
    first_wait_ends: Moment,
    views: Arc<ViewFence>,
    told: OnceLock<LeaderChange>,
}

impl fmt::Debug for LeaderLocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaderLocator").field("address", &self.address).finish_non_exhaustive()
    }
}

#[derive(Debug)]
enum Source {
    List(Vec<Endpoint>),
    Service(Arc<dyn LeaseService>),
}

#[derive(Debug, Default)]
struct LocatorState {
    current: Option<Current>,
    /// The master of the list whose calls failed. Other calls may still wait for its answers.
    doubted: Option<Doubted>,
    /// The index in the list of the master that is tried first.
    next: usize,
    /// Whether a call looks for a master in the list.
    is_searching: bool,
    /// Whether a master of the list was found before.
    has_led: bool,
    /// The last failure of the service.
    failure: Option<Error>,
    /// When a call asked the service last.
    asked_at: Moment,
    is_closed: bool,
}

#[derive(Debug)]
struct Current {
    endpoint: Endpoint,
    view: View,
    link: Arc<SocketLink>,
}

#[derive(Debug, Clone)]
struct Doubted {
    /// The place in the list.
    index: usize,
    link: Arc<SocketLink>,
    /// Whether a call has had no answer in time, and no connection has broken.
    is_only_late: bool,
}

impl LocatedLink {
    /// Creates a link; the first call connects.
    ///
    /// # Errors
    /// The settings do not fit the address, or the thread that watches cannot be started.
    pub(super) fn new(address: MasterAddress, config: LinkConfig) -> Result<Self> {
        let source = source(&address, &config)?;
        let shared = Arc::new(LeaderLocator {
            address,
            config,
            source,
            state: Mutex::default(),
            changed: Condvar::new(),
            first_wait_ends: SystemClock.now() + FIRST_WAIT,
            views: Arc::default(),
            told: OnceLock::new(),
        });
        let threads = Threads::new(1);
        if let Source::Service(service) = &shared.source {
            let (service, watching) = (Arc::clone(service), Arc::clone(&shared));
            threads.spawn("mc-leader", move || watching.watch(&*service)).map_err(|source| {
                Error::internal("the thread that watches the leader does not start")
                    .caused_by(source)
            })?;
        }
        Ok(Self { shared, threads })
    }

    fn is_forked(&self) -> bool {
        self.threads.is_forked()
    }
}

impl MasterLink for LocatedLink {
    fn call(
        &self,
        request: v1::Request,
        deadline: Moment,
    ) -> Result<v1::Response, Box<CallFailure>> {
        if self.is_forked() {
            let text =
                "the link to the master was made before a fork and belongs to the parent process";
            return Err(CallFailure::last(
                Error::closed(text).with("master", &self.shared.address),
            ));
        }
        let (link, mut failure) = match self.shared.attempt(request, deadline) {
            Ok(response) => return Ok(response),
            Err((None, failure)) => return Err(failure),
            Err((Some(link), failure)) => (link, failure),
        };
        match failure.request.take() {
            // Nothing was sent to the former leader: the next one may serve already.
            Some(request) if failure.is_unsent() && self.shared.has_left(&link) => {
                let former = failure.kind;
                self.shared.attempt(request, deadline).map_err(|(link, mut failure)| {
                    if link.is_none() {
                        // None serves yet, which is awaited as after any connection that broke.
                        failure.kind = former;
                    }
                    failure
                })
            }
            request => {
                failure.request = request;
                Err(failure)
            }
        }
    }

    fn address(&self) -> String {
        if self.is_forked() {
            return self.shared.address.to_string();
        }
        let state = self.shared.state.lock();
        match &state.current {
            Some(current) => current.endpoint.to_string(),
            None => self.shared.address.to_string(),
        }
    }

    fn on_leader_change(&self, told: LeaderChange) {
        let _ = self.shared.told.set(told);
    }

    fn close(&self) {
        self.threads.stop(|| {
            {
                let mut state = self.shared.state.lock();
                state.is_closed = true;
                if let Some(current) = &state.current {
                    current.link.close();
                }
                if let Some(doubted) = &state.doubted {
                    doubted.link.close();
                }
            }
            self.shared.changed.notify_all();
            if let Source::Service(service) = &self.shared.source {
                service.close();
            }
        });
    }
}

impl Drop for LocatedLink {
    fn drop(&mut self) {
        self.close();
    }
}

impl LeaderLocator {
    /// Makes a call at the present master. A failure has the link to that, if there is one.
    fn attempt(
        &self,
        request: v1::Request,
        deadline: Moment,
    ) -> Result<v1::Response, (Option<Arc<SocketLink>>, Box<CallFailure>)> {
        let link = match self.link(deadline) {
            Ok(link) => link,
            Err(error) => {
                let kind = match error.kind() {
                    ErrorKind::Closed => AttemptFailure::Final,
                    _ => AttemptFailure::Unreachable,
                };
                let error = error.with("master", &self.address);
                return Err((None, Box::new(CallFailure { error, kind, request: Some(request) })));
            }
        };
        link.call(request, deadline).map_err(|mut failure| {
            self.record_failure(&link, &mut failure, deadline);
            (Some(link), failure)
        })
    }

    /// Returns the link to the present master.
    fn link(&self, deadline: Moment) -> Result<Arc<SocketLink>> {
        match &self.source {
            Source::List(list) => self.link_of_list(list, deadline),
            Source::Service(_) => self.link_of_leader(deadline),
        }
    }

    fn link_of_leader(&self, deadline: Moment) -> Result<Arc<SocketLink>> {
        let mut state = self.state.lock();
        let until = deadline.min(self.first_wait_ends.max(SystemClock.now() + POLL_INTERVAL));
        loop {
            if let Some(link) = state.open_link()? {
                return Ok(link);
            }
            let left = mooncake_os::call_limit::next_wait(until);
            if left.is_zero() {
                let text = "no master leads, as far as the lease service knows";
                let error = Error::new(ErrorCode::UNAVAILABLE_IN_CURRENT_STATUS, text);
                return Err(match &state.failure {
                    Some(failure) => error.caused_by(failure.clone()),
                    None => error,
                });
            }
            self.changed.wait_for(&mut state, left);
        }
    }

    fn link_of_list(&self, list: &[Endpoint], deadline: Moment) -> Result<Arc<SocketLink>> {
        let (first, doubted) = {
            let mut state = self.state.lock();
            loop {
                if let Some(link) = state.open_link()? {
                    return Ok(link);
                }
                if !state.is_searching {
                    state.is_searching = true;
                    break (state.next, state.doubted.clone());
                }
                let left = mooncake_os::call_limit::next_wait(deadline);
                if left.is_zero() {
                    let text = "another call still looks for a master in the list";
                    return Err(Error::new(ErrorCode::RPC_TIMEOUT, text));
                }
                self.changed.wait_for(&mut state, left);
            }
        };
        let found = self.search(list, first, doubted.as_ref(), deadline);
        let mut state = self.state.lock();
        state.is_searching = false;
        self.changed.notify_all();
        let (index, link) = found?;
        if state.is_closed {
            return Err(pool::link_closed());
        }
        state.next = index;
        let endpoint = list[index].clone();
        state.current = Some(Current { endpoint, view: View(0), link: Arc::clone(&link) });
        let is_first = !std::mem::replace(&mut state.has_led, true);
        state.doubted = None;
        drop(state);
        let is_new = match doubted {
            Some(doubted) if doubted.index == index => !doubted.is_only_late,
            Some(doubted) => {
                // Calls that wait for the former master are repeated at this one.
                doubted.link.close();
                true
            }
            None => !is_first,
        };
        if is_new {
            self.tell();
        }
        Ok(link)
    }

    /// Returns the first master that answers, beginning at an index. The doubted master keeps its
    /// link.
    fn search(
        &self,
        list: &[Endpoint],
        first: usize,
        doubted: Option<&Doubted>,
        deadline: Moment,
    ) -> Result<(usize, Arc<SocketLink>)> {
        let until = deadline.min(SystemClock.now() + self.config.connect_timeout);
        let mut last = None;
        for turn in 0..list.len() {
            let index = (first + turn) % list.len();
            let link = match doubted {
                Some(doubted) if doubted.index == index => Arc::clone(&doubted.link),
                _ => {
                    let address = list[index].clone().or_port(DEFAULT_PORT);
                    let (config, views) = (self.config.clone(), Arc::clone(&self.views));
                    Arc::new(SocketLink::to(address, config, views))
                }
            };
            let now = SystemClock.now();
            // A silent master must leave time for the masters after it.
            let share = until.left(now) / u32::try_from(list.len() - turn).unwrap_or(1);
            match link.greeting(now + share) {
                Ok(_) => return Ok((index, link)),
                Err(error) => last = Some(error.with("tried", &list[index])),
            }
        }
        Err(last.expect("a list has at least one address"))
    }

    /// Looks for another master after a failure of this one.
    fn record_failure(&self, link: &Arc<SocketLink>, failure: &mut CallFailure, deadline: Moment) {
        use AttemptFailure::{Broken, CutOff, Final, Refused, TimedOut, Unreachable, Unsent};
        let is_current = {
            let state = self.state.lock();
            !state.is_closed && state.is_current(link)
        };
        if !is_current {
            // The link was closed because another master leads now.
            if failure.kind == Final && failure.error.kind() == ErrorKind::Closed {
                failure.kind = Unreachable;
            }
            return;
        }
        match (&self.source, failure.kind) {
            (_, Final | Refused) => {}
            // The next call asks for a greeting: a process that is stopped gives none.
            (Source::List(list), Unreachable | Unsent | Broken | CutOff | TimedOut) => {
                let mut state = self.state.lock();
                if state.is_current(link) {
                    state.doubt_current(failure.kind);
                    state.next =
                        (state.next + usize::from(failure.kind == Unreachable)) % list.len();
                }
            }
            (Source::Service(service), _) => self.ask(&**service, deadline),
        }
    }

    /// Returns whether later calls are made at another link, or look for one.
    fn has_left(&self, link: &Arc<SocketLink>) -> bool {
        let state = self.state.lock();
        !state.is_closed && !state.is_current(link)
    }

    /// Asks the service who leads, unless a call did so a moment ago.
    fn ask(&self, service: &dyn LeaseService, deadline: Moment) {
        let now = SystemClock.now();
        {
            let mut state = self.state.lock();
            if !(state.asked_at + POLL_INTERVAL).has_passed(now) {
                return;
            }
            state.asked_at = now;
        }
        match service.read(deadline.min(now + READ_TIMEOUT)) {
            Ok(snapshot) => self.follow(&snapshot),
            Err(error) => self.state.lock().failure = Some(error),
        }
    }

    fn watch(&self, service: &dyn LeaseService) {
        let mut seen = Snapshot::default();
        loop {
            let watched = service.watch(&seen, SystemClock.now() + WATCH_WINDOW);
            if self.state.lock().is_closed {
                return;
            }
            match watched {
                Ok(snapshot) => {
                    self.follow(&snapshot);
                    seen = snapshot;
                }
                Err(error) => {
                    tracing::debug!(%error, "the watch of the leader broke");
                    let mut state = self.state.lock();
                    state.failure = Some(error);
                    if !state.is_closed {
                        self.changed.wait_for(&mut state, POLL_INTERVAL);
                    }
                }
            }
        }
    }

    /// Goes over to the leader that the service names. While there is none, the former one may still
    /// answer.
    fn follow(&self, snapshot: &Snapshot) {
        let Some(leader) = &snapshot.leader else { return };
        let LeaderAddress::Serving(address) = &leader.address else { return };
        let endpoint = match address.parse::<Endpoint>() {
            Ok(endpoint) => endpoint.or_port(DEFAULT_PORT),
            Err(error) => {
                self.state.lock().failure = Some(error);
                return;
            }
        };
        let mut state = self.state.lock();
        state.failure = None;
        if let Some(current) = &mut state.current {
            if leader.view < current.view {
                tracing::warn!(
                    known = %current.view, told = %leader.view,
                    "the lease service names the leader of an earlier view"
                );
                return;
            }
            if leader.view == current.view && current.endpoint == endpoint {
                return;
            }
            tracing::info!(from = %current.endpoint, to = %endpoint, view = %leader.view, "another master leads");
            // Calls that wait for the former leader are repeated at the new one.
            current.link.close();
        }
        if !state.is_closed {
            let (config, views) = (self.config.clone(), Arc::clone(&self.views));
            let link = Arc::new(SocketLink::to(endpoint.clone(), config, views));
            state.current = Some(Current { endpoint, view: leader.view, link });
            self.changed.notify_all();
            drop(state);
            self.tell();
        }
    }

    /// Tells the client that another master leads, which knows nothing of it yet.
    fn tell(&self) {
        if let Some(told) = self.told.get() {
            told();
        }
    }
}

impl LocatorState {
    fn open_link(&self) -> Result<Option<Arc<SocketLink>>> {
        if self.is_closed {
            return Err(pool::link_closed());
        }
        Ok(self.current.as_ref().map(|current| Arc::clone(&current.link)))
    }

    /// Has the next call look for a master.
    fn doubt_current(&mut self, failure: AttemptFailure) {
        let Some(current) = self.current.take() else { return };
        current.link.drop_idle();
        let is_only_late = failure == AttemptFailure::TimedOut;
        self.doubted = Some(Doubted { index: self.next, link: current.link, is_only_late });
    }

    fn is_current(&self, link: &Arc<SocketLink>) -> bool {
        self.current.as_ref().is_some_and(|current| Arc::ptr_eq(&current.link, link))
    }
}

fn source(address: &MasterAddress, config: &LinkConfig) -> Result<Source> {
    let cluster = || ClusterId::new(&config.cluster);
    let service: Arc<dyn LeaseService> = match address {
        MasterAddress::Fixed(endpoint) => return Ok(Source::List(vec![endpoint.clone()])),
        MasterAddress::List(list) => return Ok(Source::List(list.clone())),
        MasterAddress::Etcd(members) => Arc::new(EtcdLease::new(members, &cluster()?, ANY_TTL)?),
        MasterAddress::Redis(server) => {
            Arc::new(RedisLease::new(server.clone(), &cluster()?, ANY_TTL))
        }
        MasterAddress::Kubernetes { namespace, lease } => {
            Arc::new(KubernetesLease::in_pod(namespace, lease, ANY_TTL)?)
        }
    };
    Ok(Source::Service(service))
}
