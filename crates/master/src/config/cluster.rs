//! The settings of one of several masters.

use std::{net::SocketAddr, time::Duration};

use mooncake_base::{Error, Result, env};
use mooncake_kv_client::redis::RedisLogin;

use super::MasterConfig;
use crate::journal::OnLogFailure;

/// The service that elects the leader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseBackend {
    /// etcd, through its HTTP gateway.
    Etcd,
    /// A Redis server.
    Redis,
    /// A Lease of Kubernetes.
    Kubernetes,
}

/// The settings of one of several masters.
#[derive(Debug, Clone, PartialEq)]
pub struct ClusterConfig {
    /// Whether this master is one of several.
    pub is_member: bool,
    /// The service that elects the leader.
    pub backend: LeaseBackend,
    /// Where the service is.
    pub connection: String,
    /// The older form of `connection`, for etcd.
    pub etcd_endpoints: String,
    /// The duration of the leader's lease.
    pub lease_ttl: Duration,
    /// Number of masters, the leader included, that have every change before it is acknowledged.
    pub copies: usize,
    /// Time without a confirmation after which a standby is taken out of the in-sync set.
    pub in_sync_timeout: Duration,
    /// Whether this master leads as soon as no other does, whatever it lacks.
    pub is_forced: bool,
    /// The address at which clients and standbys reach this master; empty: that of the RPC port.
    pub advertised: String,
    /// The namespace of the pod.
    pub pod_namespace: String,
    /// The name of the pod.
    pub pod_name: String,
    /// The login for a Redis server. The program reads it from the environment.
    pub redis: RedisLogin,
}

impl Default for ClusterConfig {
    fn default() -> Self {
        Self {
            is_member: false,
            backend: LeaseBackend::Etcd,
            connection: String::new(),
            etcd_endpoints: String::new(),
            lease_ttl: Duration::from_secs(5),
            copies: 2,
            in_sync_timeout: Duration::from_millis(200),
            is_forced: false,
            advertised: String::new(),
            pod_namespace: String::new(),
            pod_name: String::new(),
            redis: RedisLogin::default(),
        }
    }
}

impl ClusterConfig {
    /// Returns where the lease service is.
    ///
    /// # Errors
    /// No option says so.
    pub fn place(&self) -> Result<&str> {
        let older = if self.backend == LeaseBackend::Etcd { &self.etcd_endpoints[..] } else { "" };
        [self.connection.trim(), older.trim()]
            .into_iter()
            .find(|place| !place.is_empty())
            .ok_or_else(|| {
                Error::invalid("several masters need a service that elects the leader")
                    .with("option", "--ha_backend_connstring")
                    .with_remedy(
                        "Name it: members of etcd as a:2379;b:2379, a Redis server as host:6379, a \
                         Lease of Kubernetes as namespace/name.",
                    )
            })
    }
}

/// Reads the login for a Redis server.
///
/// # Errors
/// The number of the database is invalid.
pub(super) fn redis_login() -> Result<RedisLogin> {
    let variable = &env::MC_REDIS_DB_INDEX;
    let database = variable.read().map(|text| mooncake_base::parse::read_number(&text));
    let database = database.transpose().map_err(|error| error.with("variable", variable.name))?;
    Ok(RedisLogin {
        username: env::MC_REDIS_USERNAME.read().unwrap_or_default(),
        password: env::MC_REDIS_PASSWORD.read().unwrap_or_default(),
        database: database.unwrap_or_default(),
    })
}

impl MasterConfig {
    /// Checks the settings of one of several masters.
    pub(super) fn check_cluster(&self) -> Result<()> {
        let cluster = &self.cluster;
        if !cluster.is_member {
            return Ok(());
        }
        let refuse =
            |option: &'static str, why: &str| Err(Error::invalid(why).with("option", option));
        cluster.place()?;
        if self.state_path().is_none() && self.state_home.is_some() {
            return refuse("state_dir", "several masters need a log: name a directory and a port");
        }
        if self.on_log_failure == Some(OnLogFailure::Continue) {
            let why = "one of several masters stops when its log fails, so that another one leads";
            return refuse("on_log_failure", why);
        }
        if !(1..=16).contains(&cluster.copies) {
            return refuse("in_sync_copies", "the number is not between 1 and 16");
        }
        if cluster.in_sync_timeout < Duration::from_millis(10) {
            return refuse("in_sync_timeout_ms", "the time is shorter than 10 ms");
        }
        Ok(())
    }

    /// Returns the address that a leader tells others, given the one that is bound.
    ///
    /// # Errors
    /// Others could not reach it.
    pub(crate) fn advertised_address(&self, bound: SocketAddr) -> Result<String> {
        let told = self.cluster.advertised.trim();
        if !told.is_empty() {
            let endpoint: mooncake_base::Endpoint = told.parse()?;
            return Ok(endpoint.or_port(bound.port()).to_string());
        }
        if !bound.ip().is_unspecified() {
            return Ok(bound.to_string());
        }
        let why = "other masters and clients must be told an address of this one";
        Err(Error::invalid(why).with("option", "--advertise_address").with_remedy(
            "Give --rpc_address an address of this host, or --advertise_address a name or address.",
        ))
    }
}
