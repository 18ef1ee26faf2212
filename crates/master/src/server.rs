//! What outlives a term: the listeners of a master and who answers at them.
//!
//! A single master has one term, from its start to its end. One of several masters has a term each time
//! it leads; in between, its listeners answer that it is a standby.

use std::{
    io,
    sync::{Arc, OnceLock},
    time::{Duration, SystemTime},
};

use axum::Router;
use mooncake_base::{Clock, Error, Result, sync::Mutex};
use mooncake_os::rlimit::limit;
use tokio::{
    net::TcpListener,
    runtime::Handle,
    sync::{Semaphore, mpsc},
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    addresses::Addresses,
    admin::{self, metadata::Metadata},
    cluster::{Cluster, LogSource},
    config::MasterConfig,
    events::{self, Events},
    journal::{Maintenance, RecoveredJournal},
    rlimit::connections_max,
    service::{
        Admission, Service,
        connection::{ServerContext, grpc_stream::GrpcStream},
        dedicated_thread::DEDICATED_THREADS_MAX,
        grpc,
        listen::CONNECTIONS_MAX,
        unproven::ConnectionPermits,
    },
    state::Restored,
};

/// How long connections may take to end before they are aborted.
const DRAIN_DEADLINE: Duration = Duration::from_secs(2);

/// How long calls under way may take to end before another master takes over.
const HANDOVER_DRAIN: Duration = Duration::from_millis(300);

/// The maximum interval between two runs of the timers.
const TICK_MAX: Duration = Duration::from_millis(250);

/// The minimum interval between two runs of the timers.
const TICK_MIN: Duration = Duration::from_millis(5);

/// How often a summary line is logged.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// The server of a master: accepted connections go to the service that is present, if one is.
#[derive(Debug)]
pub(crate) struct Server {
    config: MasterConfig,
    clock: Arc<dyn Clock>,
    runtime: Handle,
    addresses: Addresses,
    unix_name: Arc<str>,
    permits: ConnectionPermits,
    dedicated_threads: Arc<Semaphore>,
    metadata: Arc<Metadata>,
    /// The listener of the events, of which each running service has a copy.
    events: Option<std::net::TcpListener>,
    stop: CancellationToken,
    kill: CancellationToken,
    /// The tasks that are not those of a running service.
    tasks: TaskTracker,
    present: Mutex<Option<Present>>,
    cluster: OnceLock<Arc<Cluster>>,
}

/// Who answers at this moment.
#[derive(Debug, Clone)]
struct Present {
    context: ServerContext,
    admin: Router,
}

/// Where quotas come from at the start of a term.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QuotaSource {
    /// The quota file of this master.
    File,
    /// The log, which a former leader wrote; the file becomes like it.
    Log,
}

/// A service that answers at the listeners, with its tasks and threads.
#[derive(Debug)]
pub(crate) struct RunningService {
    service: Arc<Service>,
    stop: CancellationToken,
    kill: CancellationToken,
    tasks: TaskTracker,
    maintenance: Option<Maintenance<Service>>,
}

impl Server {
    /// Creates the server of a master whose listeners are bound. Nobody answers yet.
    pub(crate) fn new(
        config: MasterConfig,
        clock: Arc<dyn Clock>,
        addresses: Addresses,
        unix_name: Arc<str>,
        events: Option<std::net::TcpListener>,
    ) -> Self {
        Self {
            config,
            clock,
            runtime: Handle::current(),
            addresses,
            unix_name,
            permits: ConnectionPermits::new(connections_max(CONNECTIONS_MAX, limit())),
            dedicated_threads: Arc::new(Semaphore::new(DEDICATED_THREADS_MAX)),
            metadata: Arc::default(),
            events,
            stop: CancellationToken::new(),
            kill: CancellationToken::new(),
            tasks: TaskTracker::new(),
            present: Mutex::default(),
            cluster: OnceLock::new(),
        }
    }

    /// Makes this the server of a member of a cluster. Called once.
    pub(crate) fn set_cluster(&self, cluster: Arc<Cluster>) {
        let _ = self.cluster.set(cluster);
    }

    /// Returns the cluster; `None` for a single master.
    pub(crate) fn cluster(&self) -> Option<&Arc<Cluster>> {
        self.cluster.get()
    }

    pub(crate) const fn config(&self) -> &MasterConfig {
        &self.config
    }

    pub(crate) const fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    pub(crate) const fn metadata(&self) -> &Arc<Metadata> {
        &self.metadata
    }

    /// Cancelled when the master stops.
    pub(crate) const fn stop_token(&self) -> &CancellationToken {
        &self.stop
    }

    /// Returns the context of connections; `None` while this master does not lead.
    pub(crate) fn context(&self) -> Option<ServerContext> {
        self.present.lock().as_ref().map(|present| present.context.clone())
    }

    /// Returns the admin pages; `None` while this master does not lead.
    pub(crate) fn admin(&self) -> Option<Router> {
        self.present.lock().as_ref().map(|present| present.admin.clone())
    }

    /// Returns the service; `None` while this master does not lead.
    pub(crate) fn service(&self) -> Option<Arc<Service>> {
        self.present.lock().as_ref().map(|present| present.context.service.clone())
    }

    /// Spawns a task that ends by itself when the master stops, and is aborted if it takes too long.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        spawn(&self.runtime, &self.tasks, &self.stop, &self.kill, task);
    }

    /// Spawns a task that ends soon, of a connection to a standby.
    pub(crate) fn spawn_answer(&self, task: impl Future<Output = ()> + Send + 'static) {
        let stop = self.stop.clone();
        let whole = async move {
            stop.run_until_cancelled(task).await;
        };
        self.tasks.spawn_on(whole, &self.runtime);
    }

    pub(crate) const fn permits(&self) -> &ConnectionPermits {
        &self.permits
    }

    /// Creates a service over a log.
    ///
    /// # Errors
    /// The quota file cannot be read.
    pub(crate) fn make_service(
        &self,
        recovered: RecoveredJournal,
        quotas: QuotaSource,
    ) -> Result<(Service, Restored)> {
        let (rules, clock) = (self.config.rules(), self.clock.clone());
        let (service, restored) = Service::from_log(rules, clock, recovered);
        self.set_up(&service, quotas)?;
        Ok((service, restored))
    }

    /// Gives a service what the configuration says of it.
    ///
    /// # Errors
    /// The quota file cannot be read.
    pub(crate) fn set_up(&self, service: &Service, quotas: QuotaSource) -> Result<()> {
        let path = &self.config.tenant_policy;
        match quotas {
            _ if !self.config.is_multi_tenant => {}
            QuotaSource::File => service.load_quota_file(path)?,
            QuotaSource::Log => {
                if let Err(error) = service.write_quota_file(path) {
                    tracing::error!(%error, "quotas are those of the log, and changes are not in the file");
                }
            }
        }
        service.set_addresses(self.addresses);
        service.slow_log().set_threshold(self.config.slow_call);
        Ok(())
    }

    /// Lets a service answer at the listeners from now on. `source` is the log for standbys.
    ///
    /// # Errors
    /// A thread of the log cannot be started, or the listener of the events cannot be used.
    pub(crate) fn start_service(
        self: &Arc<Self>,
        service: Arc<Service>,
        source: Option<Arc<LogSource>>,
    ) -> Result<RunningService> {
        let _in_runtime = self.runtime.enter();
        let maintenance = service
            .shared()
            .journal()
            .is_some()
            .then(|| Maintenance::start(&service))
            .transpose()?;
        let running = RunningService {
            service: service.clone(),
            stop: self.stop.child_token(),
            kill: self.kill.child_token(),
            tasks: TaskTracker::new(),
            maintenance,
        };
        if let (Some(listener), Some(address)) = (&self.events, self.addresses.events) {
            let listener =
                listener.try_clone().and_then(TcpListener::from_std).map_err(|source| {
                    Error::internal("the listener of the events cannot be used").caused_by(source)
                })?;
            // A single master counts from one, as upstream's does.
            let before = source.as_ref().map_or(0, |_| events::sequence_at(SystemTime::now()));
            let events = Arc::new(Events::new(self.config.events.clone(), address, before));
            service.set_events(events.clone());
            tracing::info!(%address, backend_id = self.config.events.backend_id, "events are published");
            self.spawn_in(&running, events.serve(listener, running.stop.clone()));
        }
        let is_cleaned = self.config.is_metadata_cleaned && self.config.has_metadata;
        let cleaned = is_cleaned.then(|| self.metadata.clone());
        self.spawn_until_stop(&running, run_timers(service.clone(), cleaned));
        if self.config.is_reporting {
            self.spawn_until_stop(&running, log_summary(service.clone()));
        }
        let (admin, sampling) = admin::pages(service, self);
        self.spawn_until_stop(&running, sampling);
        let context = self.context_of(&running, source);
        *self.present.lock() = Some(Present { context, admin });
        Ok(running)
    }

    /// Stops a service: aborts its connections, and syncs its log.
    pub(crate) fn stop_service(&self, running: RunningService) {
        self.present.lock().take();
        running.stop.cancel();
        running.kill.cancel();
        running.tasks.close();
        self.runtime.block_on(async {
            // Aborted tasks end at their next await. A task that computes is not waited for any longer.
            let _ = timeout(DRAIN_DEADLINE, running.tasks.wait()).await;
        });
        drop(running.maintenance);
    }

    /// Takes no more calls, and lets those under way end, for a short while.
    pub(crate) fn drain(&self, running: &RunningService) {
        self.present.lock().take();
        running.stop.cancel();
        running.tasks.close();
        self.runtime.block_on(async {
            let _ = timeout(HANDOVER_DRAIN, running.tasks.wait()).await;
        });
    }

    /// Closes the listeners, gives calls in flight up to two seconds to end, and stops.
    ///
    /// Not cancel-safe: if the future is dropped, connections stay.
    pub(crate) async fn stop(&self, running: Option<RunningService>) {
        self.stop.cancel();
        self.tasks.close();
        let tasks = running.as_ref().map_or_else(TaskTracker::new, |running| running.tasks.clone());
        tasks.close();
        let all = async {
            self.tasks.wait().await;
            tasks.wait().await;
        };
        let mut all = std::pin::pin!(all);
        if timeout(DRAIN_DEADLINE, &mut all).await.is_err() {
            let connections = tasks.len();
            tracing::info!(connections, "aborting connections that did not end in time");
            self.kill.cancel();
            // Aborted tasks end at their next await. A task that computes is not waited for any
            // longer.
            let _ = timeout(DRAIN_DEADLINE, all).await;
        }
        self.present.lock().take();
        let maintenance = running.and_then(|running| running.maintenance);
        // Ending the maintenance thread syncs the log, which may take as long as the disk does.
        let _ = timeout(DRAIN_DEADLINE, tokio::task::spawn_blocking(|| drop(maintenance))).await;
    }

    /// Ends everything at once.
    pub(crate) fn kill(&self) {
        self.stop.cancel();
        self.kill.cancel();
        self.tasks.close();
    }

    /// Creates the context shared by all connections of a running service.
    fn context_of(
        &self,
        running: &RunningService,
        source: Option<Arc<LogSource>>,
    ) -> ServerContext {
        let admission = Admission::new(self.runtime.metrics().num_workers());
        running.service.set_admission(admission.clone());
        let config = &self.config;
        let (to_grpc, from_sniffers) = mpsc::channel(128);
        let context = ServerContext {
            service: running.service.clone(),
            unix_name: self.unix_name.clone(),
            token: config.rpc_token.clone(),
            is_nodelay: config.is_tcp_nodelay,
            idle: (!config.rpc_idle_timeout.is_zero()).then_some(config.rpc_idle_timeout),
            stop: running.stop.clone(),
            kill: running.kill.clone(),
            tasks: running.tasks.clone(),
            admission,
            permits: self.permits.clone(),
            dedicated_threads: self.dedicated_threads.clone(),
            to_grpc,
            log_source: source,
        };
        serve_grpc(&context, from_sniffers);
        context
    }

    /// Returns the server of a service that serves from the start.
    #[cfg(test)]
    pub(crate) fn for_tests(context: &ServerContext) -> Arc<Self> {
        let rpc = ([127, 0, 0, 1], 1).into();
        let addresses = Addresses { rpc, admin: None, metadata: None, events: None };
        let clock = mooncake_base::SystemClock::shared();
        let mut server = Self::new(MasterConfig::embedded(), clock, addresses, "".into(), None);
        server.stop = context.stop.clone();
        let server = Arc::new(server);
        let (to_grpc, from_sniffers) = mpsc::channel(128);
        let context = ServerContext { to_grpc, ..context.clone() };
        serve_grpc(&context, from_sniffers);
        let (admin, _) = admin::pages(context.service.clone(), &server);
        *server.present.lock() = Some(Present { context, admin });
        server
    }

    /// Spawns a task of a running service that needs no cleanup when it ends.
    fn spawn_until_stop(
        &self,
        running: &RunningService,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        let stop = running.stop.clone();
        self.spawn_in(running, async move {
            stop.run_until_cancelled(task).await;
        });
    }

    fn spawn_in(&self, running: &RunningService, task: impl Future<Output = ()> + Send + 'static) {
        spawn(&self.runtime, &running.tasks, &running.stop, &running.kill, task);
    }
}

fn serve_grpc(context: &ServerContext, connections: mpsc::Receiver<io::Result<GrpcStream>>) {
    context.spawn(grpc::serve(
        context.service.clone(),
        context.admission.clone(),
        context.token.clone(),
        connections,
        context.stop.clone(),
    ));
}

/// Spawns a task that ends by itself after `stop`, and is aborted by `kill`.
fn spawn(
    runtime: &Handle,
    tasks: &TaskTracker,
    stop: &CancellationToken,
    kill: &CancellationToken,
    task: impl Future<Output = ()> + Send + 'static,
) {
    let (stop, kill) = (stop.clone(), kill.clone());
    let whole = async move {
        kill.run_until_cancelled(task).await;
        // A task that ends without a stop is a bug.
        if !stop.is_cancelled() && !kill.is_cancelled() {
            tracing::error!("a task of the master ended unexpectedly");
        }
    };
    tasks.spawn_on(whole, runtime);
}

/// Runs the timers of the state and forgets expired clients.
async fn run_timers(service: Arc<Service>, cleaned: Option<Arc<Metadata>>) {
    loop {
        let due = service.advance();
        for (name, gone) in service.take_expired_clients() {
            tracing::warn!(
                client = name,
                segments = gone.segments,
                copies = gone.copies,
                bytes = gone.bytes,
                "a client expired: no heartbeat within its TTL; objects that have no copy elsewhere \
                 are lost"
            );
            if let Some(metadata) = &cleaned {
                metadata.remove_engine(&name);
            }
        }
        let wait = due.map_or(TICK_MAX, |due| due.left(service.now()));
        tokio::time::sleep(wait.clamp(TICK_MIN, TICK_MAX)).await;
    }
}

async fn log_summary(service: Arc<Service>) {
    let mut previous = admin::summary::CounterSnapshot::take(&service);
    loop {
        tokio::time::sleep(REPORT_INTERVAL).await;
        let present = admin::summary::CounterSnapshot::take(&service);
        tracing::info!("{}", admin::summary::log_line(&previous, &present));
        previous = present;
    }
}
