//! The configuration of a master: addresses, lifetimes, eviction and durability.
//!
//! [`MasterConfig`] is plain data with upstream's defaults. [`OPTIONS`] declares flags, file keys
//! and help texts in one place. [`from_arguments`] reads a command line, its flag files and its
//! configuration file; [`MasterConfig::check`] refuses invalid values.

mod cluster;
mod events;
mod file;
pub(crate) mod help;
mod options;
pub mod quota_file;
mod secret;
mod token;
mod unsupported;
mod yaml;

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use mooncake_base::{Error, Result, Token, env, options::resolve};
use mooncake_cli::CliCommand;

pub use cluster::{ClusterConfig, LeaseBackend};
pub use events::EventsConfig;
pub use options::OPTIONS;
pub use secret::Secret;

use crate::{
    journal::{LogSync, OnLogFailure},
    state::{
        AllocationStrategy, EvictionKind, OffloadRules, PromotionRules, Rules, TaskRules, Watermark,
    },
};

/// The default RPC port.
pub const RPC_PORT: u16 = 50051;

/// The default port of the admin server.
pub const ADMIN_PORT: u16 = 9003;

/// The default port of the embedded metadata server.
pub const METADATA_PORT: u16 = 8080;

/// The minimum time between the end of a write window and the moment when the put may be displaced.
const WRITE_MARGIN: Duration = Duration::from_secs(3);

/// The default pool usage above which upstream's master evicts in the background.
const WATERMARK: f64 = 0.9;

/// The minimum time that unclaimed segments are kept after a restart.
const UNCLAIMED_TTL: Duration = Duration::from_secs(30);

/// The location of the log.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum StateDir {
    /// Under the user's state directory, one directory per cluster id and port.
    #[default]
    Default,
    /// No log: a restart forgets everything.
    None,
    /// This directory.
    At(PathBuf),
}

/// All settings of a master.
#[derive(Debug, Clone, PartialEq)]
pub struct MasterConfig {
    /// The file that the configuration was read from; empty for none.
    pub config_path: String,
    /// The address that the RPC port binds.
    pub rpc_address: String,
    /// Binds the IPv4 address of this network interface instead of `rpc_address`.
    pub rpc_interface: String,
    /// The RPC port; 0 takes a free one. Not given: `port`.
    pub rpc_port: Option<u16>,
    /// The older name of `rpc_port`.
    pub port: Option<u16>,
    /// The number of runtime threads; 0 takes four, or as many as there are cores.
    pub rpc_threads: usize,
    /// The older limit of threads, honoured when `rpc_threads` is 0.
    pub threads_max: Option<usize>,
    /// The idle timeout of RPC connections; zero: none, but ten minutes for those of HTTP/2.
    pub rpc_idle_timeout: Duration,
    /// Sets `TCP_NODELAY` on RPC connections.
    pub is_tcp_nodelay: bool,
    /// The token that callers of the RPC port must know; `None`: everybody may call. The program
    /// reads it from `--rpc_token_file`, or else from `MOONCAKE_MASTER_TOKEN`.
    pub rpc_token: Option<Token>,

    /// Whether there is an admin server. Not an option: the program always has one.
    pub has_admin: bool,
    /// The address that the admin port binds.
    pub admin_host: String,
    /// The admin port; 0 takes a free one. Not given: 9003, or a free one if that is taken.
    pub admin_port: Option<u16>,
    /// Names under which browsers may read the admin port.
    pub admin_hosts: Vec<String>,
    /// Serves upstream's metric names, too.
    pub has_upstream_metrics: bool,
    /// Logs a summary line every ten seconds.
    pub is_reporting: bool,
    /// The token that allows changes through the admin port from other hosts.
    pub admin_token: Secret,
    /// The file that the bound addresses are written to; empty for none.
    pub ports_file: String,
    /// The minimum duration of a call recorded as slow; zero turns the slow log off.
    pub slow_call: Duration,

    /// Whether the master also serves engines' metadata over HTTP.
    pub has_metadata: bool,
    /// The address that the metadata port binds.
    pub metadata_host: String,
    /// The metadata port; 0 takes a free one.
    pub metadata_port: u16,
    /// Deletes the metadata of expired clients.
    pub is_metadata_cleaned: bool,

    /// The duration of the lease that a read or a probe grants.
    pub lease_ttl: Duration,
    /// The default duration of a soft pin.
    pub soft_pin_ttl: Duration,
    /// The maximum duration of a soft pin.
    pub soft_pin_ttl_max: Duration,
    /// Whether soft-pinned objects may be evicted when nothing else can be evicted.
    pub is_soft_pin_evictable: bool,
    /// The share of objects that one round of eviction takes.
    pub eviction_ratio: f64,
    /// The pool usage above which objects are evicted in the background. Not given: objects are
    /// evicted only when a put needs space.
    pub eviction_watermark: Option<f64>,
    /// The eviction policy.
    pub eviction: EvictionKind,
    /// The time without a heartbeat after which a client expires.
    pub client_ttl: Duration,
    /// The age at which an unfinished put may be displaced by another put.
    pub put_discard_timeout: Duration,
    /// The age at which the memory of an unfinished put is reused.
    pub put_release_timeout: Duration,
    /// The maximum number of objects of a tenant.
    pub objects_per_tenant_max: u64,
    /// The maximum number of unfinished puts of a client.
    pub unfinished_puts_per_client_max: u64,
    /// Whether objects are written to the disks of clients, too.
    pub has_offload: bool,
    /// Maximum number of objects that wait to be written to disks.
    pub offload_queue_max: usize,
    /// Whether reads bring objects back from disk to memory.
    pub promotes_on_hit: bool,
    /// Number of reads within a minute that do so, at least 1.
    pub promotion_hits_min: u8,
    /// Maximum number of objects that wait to be brought back.
    pub promotion_queue_max: usize,
    /// Whether objects are written to disks when they are evicted, and not when they are put.
    pub offloads_on_eviction: bool,
    /// Whether eviction drops objects for which too many others wait.
    pub offload_drops_when_full: bool,
    /// The share of `offload_queue_max` that may wait because of eviction.
    pub offload_cap_ratio: f64,
    /// Whether records that no object is known for become objects.
    pub adopts_disk_records: bool,
    /// Time for which the objects on a disk that nobody has open are kept, hidden.
    pub disk_away_ttl: Duration,
    /// The allocation strategy: how segments are chosen.
    pub allocation: AllocationStrategy,
    /// The name of the cluster.
    pub cluster_id: String,
    /// The settings of one of several masters.
    pub cluster: ClusterConfig,
    /// Asks the master at this admin port whether it could lead, and ends; empty: serves.
    pub check_promotable: String,

    /// The settings of object events.
    pub events: EventsConfig,
    /// Gives each tenant its own keys. Only tenants with a quota may write, up to the quota.
    pub is_multi_tenant: bool,
    /// The quota file.
    pub tenant_policy: String,
    /// Limits of copies and moves.
    pub tasks: TaskRules,
    /// The location of the log and the snapshots.
    pub state_dir: StateDir,
    /// The directory that contains default state directories; `None`: no default, as for masters
    /// embedded in other programs. Not an option: the program uses the user's state directory.
    pub state_home: Option<PathBuf>,
    /// When the log is synced to disk: `LogSync::Interval` holds the interval.
    pub log_sync: LogSync,
    /// What the master does when the log cannot be written; `None`: it stops with
    /// `LogSync::Always`, and continues otherwise.
    pub on_log_failure: Option<OnLogFailure>,
    /// How long calls wait after a restart for clients that may come back.
    pub resume_grace: Duration,

    /// Options of unsupported features, with the values given.
    pub unsupported: BTreeMap<&'static str, String>,
}

impl Default for MasterConfig {
    fn default() -> Self {
        Self {
            config_path: String::new(),
            rpc_address: "0.0.0.0".to_owned(),
            rpc_interface: String::new(),
            rpc_port: None,
            port: None,
            rpc_threads: 0,
            threads_max: None,
            rpc_idle_timeout: Duration::ZERO,
            is_tcp_nodelay: true,
            rpc_token: None,
            has_admin: true,
            admin_host: "0.0.0.0".to_owned(),
            admin_port: None,
            admin_hosts: Vec::new(),
            has_upstream_metrics: true,
            is_reporting: true,
            admin_token: Secret::default(),
            ports_file: String::new(),
            slow_call: Duration::from_millis(100),
            has_metadata: false,
            metadata_host: "0.0.0.0".to_owned(),
            metadata_port: METADATA_PORT,
            is_metadata_cleaned: false,
            lease_ttl: Duration::from_secs(10),
            soft_pin_ttl: Duration::from_secs(30 * 60),
            soft_pin_ttl_max: Duration::from_secs(24 * 3600),
            is_soft_pin_evictable: true,
            eviction_ratio: 0.05,
            eviction_watermark: None,
            eviction: EvictionKind::default(),
            client_ttl: Duration::from_secs(10),
            put_discard_timeout: Duration::from_secs(30),
            put_release_timeout: Duration::from_secs(600),
            objects_per_tenant_max: Rules::default().objects_per_tenant_max,
            unfinished_puts_per_client_max: Rules::default().unfinished_puts_per_client_max,
            has_offload: false,
            offload_queue_max: 50_000,
            promotes_on_hit: false,
            promotion_hits_min: 2,
            promotion_queue_max: 50_000,
            offloads_on_eviction: false,
            offload_drops_when_full: false,
            offload_cap_ratio: 0.5,
            adopts_disk_records: false,
            disk_away_ttl: Rules::default().disk_away_ttl,
            allocation: AllocationStrategy::Random,
            cluster_id: "mooncake_cluster".to_owned(),
            cluster: ClusterConfig::default(),
            check_promotable: String::new(),
            events: EventsConfig::default(),
            is_multi_tenant: false,
            tenant_policy: String::new(),
            tasks: TaskRules::default(),
            state_dir: StateDir::Default,
            state_home: None,
            log_sync: LogSync::Interval(Duration::from_secs(1)),
            on_log_failure: None,
            resume_grace: Duration::from_secs(5),
            unsupported: BTreeMap::new(),
        }
    }
}

impl MasterConfig {
    /// Returns the configuration of a master embedded in another program: loopback, a free port, no
    /// admin server.
    pub fn embedded() -> Self {
        Self {
            rpc_address: "127.0.0.1".to_owned(),
            rpc_port: Some(0),
            has_admin: false,
            is_reporting: false,
            ..Self::default()
        }
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// The first setting with an invalid value; the error names the option.
    pub fn check(&self) -> Result<()> {
        let ratio = |option: &'static str, value: f64| {
            if (0.0..=1.0).contains(&value) {
                return Ok(());
            }
            Err(Error::invalid("the ratio is not between 0 and 1")
                .with("option", option)
                .with("value", value))
        };
        ratio("eviction_ratio", self.eviction_ratio)?;
        ratio("eviction_high_watermark_ratio", self.watermark())?;
        if self.client_ttl.is_zero() {
            return Err(Error::invalid("the client TTL is zero").with("option", "client_ttl"));
        }
        if self.lease_ttl > self.soft_pin_ttl_max.max(Duration::from_secs(24 * 3600 * 365)) {
            return Err(Error::invalid("the lease is longer than a year")
                .with("option", "default_kv_lease_ttl"));
        }
        if self.soft_pin_ttl > self.soft_pin_ttl_max {
            return Err(Error::invalid("the default soft pin is longer than the longest allowed")
                .with("option", "default_kv_soft_pin_ttl")
                .with("value_ms", self.soft_pin_ttl.as_millis())
                .with("max_kv_soft_pin_ttl_ms", self.soft_pin_ttl_max.as_millis()));
        }
        let is_id = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
        if !(1..=128).contains(&self.cluster_id.len()) || !self.cluster_id.chars().all(is_id) {
            return Err(Error::invalid(
                "a cluster id is 1 to 128 letters, digits, '_', '.' or '-'",
            )
            .with("option", "cluster_id")
            .with("value", format_args!("{:?}", self.cluster_id)));
        }
        self.events.check()?;
        if !(1..=100_000_000).contains(&self.offload_queue_max) {
            return Err(Error::invalid("the limit is not between 1 and 100000000")
                .with("option", "offloading_queue_limit"));
        }
        if self.promotion_hits_min == 0 {
            return Err(Error::invalid("the threshold is not between 1 and 255")
                .with("option", "promotion_admission_threshold"));
        }
        if !(0.0..=1.0).contains(&self.offload_cap_ratio) {
            return Err(Error::invalid("the ratio is not between 0 and 1")
                .with("option", "offload_cap_ratio"));
        }
        if self.is_multi_tenant && self.tenant_policy.is_empty() {
            return Err(Error::invalid("multi-tenancy needs a quota file")
                .with("option", "tenant_quota_connector_uri"));
        }
        self.check_cluster()?;
        unsupported::check(&self.unsupported)
    }

    /// Returns the RPC port: `rpc_port`, or else `port`, or else 50051. An explicit 0 asks for a
    /// free port, unless `port` is given, too.
    pub fn effective_rpc_port(&self) -> u16 {
        match (self.rpc_port, self.port) {
            (Some(port), None) => port,
            (Some(0) | None, Some(port)) | (Some(port), Some(_)) => port,
            (None, None) => RPC_PORT,
        }
    }

    /// Returns the state directory and whether it was set explicitly; `None` without a log.
    pub fn state_path(&self) -> Option<(PathBuf, bool)> {
        match &self.state_dir {
            StateDir::None => None,
            StateDir::At(path) => Some((path.clone(), true)),
            // A master on a free port could not be found again after a restart.
            StateDir::Default if self.effective_rpc_port() == 0 => None,
            StateDir::Default => {
                let name = format!("{}-{}", self.cluster_id, self.effective_rpc_port());
                Some((self.state_home.as_ref()?.join("mooncake").join(name), false))
            }
        }
    }

    /// Returns what the master does when the log cannot be written.
    pub fn effective_on_log_failure(&self) -> OnLogFailure {
        self.on_log_failure.unwrap_or(match self.log_sync {
            // Who waits for the disk in each put wants no put that the disk does not have.
            LogSync::Always => OnLogFailure::Stop,
            LogSync::Interval(_) | LogSync::Never => OnLogFailure::Continue,
        })
    }

    /// Returns the number of runtime threads.
    pub fn effective_threads(&self, cores: usize) -> usize {
        match (self.rpc_threads, self.threads_max) {
            (0, Some(limit)) => cores.min(4).min(limit).max(1),
            (0, None) => cores.clamp(1, 4),
            (threads, _) => threads.min(1024),
        }
    }

    /// Returns the rules of the state.
    pub fn rules(&self) -> Rules {
        let defaults = Rules::default();
        // The writer must have stopped well before its put may be displaced.
        let window = self.put_discard_timeout.saturating_sub(WRITE_MARGIN) * 2 / 3;
        let rules = Rules {
            client_ttl: self.client_ttl,
            stop_max: self.client_ttl,
            resume_grace: self.resume_grace,
            unclaimed_ttl: UNCLAIMED_TTL.max(2 * self.client_ttl),
            lease_ttl: self.lease_ttl,
            soft_pin_ttl: self.soft_pin_ttl,
            soft_pin_ttl_max: self.soft_pin_ttl_max,
            is_soft_pin_evictable: self.is_soft_pin_evictable,
            write_window: window.max(self.put_discard_timeout / 4).min(defaults.write_window),
            put_discard: self.put_discard_timeout,
            put_release: self.put_release_timeout.max(self.put_discard_timeout),
            watermark: self
                .eviction_watermark
                .filter(|high| *high < 1.0)
                .map(|high| Watermark { high, ratio: self.eviction_ratio }),
            allocation: self.allocation,
            eviction: self.eviction,
            tasks: self.tasks.clone(),
            is_multi_tenant: self.is_multi_tenant,
            objects_per_tenant_max: self.objects_per_tenant_max,
            unfinished_puts_per_client_max: self.unfinished_puts_per_client_max,
            offload: self.has_offload.then_some(OffloadRules {
                queue_max: self.offload_queue_max,
                adopts_records: self.adopts_disk_records,
                is_on_eviction: self.offloads_on_eviction,
                drops_when_full: self.offload_drops_when_full,
                moves_max: (self.offload_queue_max as f64 * self.offload_cap_ratio).ceil() as usize,
            }),
            promotion: PromotionRules {
                queue_max: self.promotion_queue_max,
                hits_min: self.promotes_on_hit.then_some(self.promotion_hits_min),
            },
            disk_away_ttl: self.disk_away_ttl,
            ..Rules::default()
        };
        // A writer may be stopped within a copy, and go on.
        Rules { put_release: rules.put_release.max(rules.late_end()), ..rules }
    }

    /// Returns one warning per given option without effect.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings: Vec<String> = unsupported::ineffective(&self.unsupported)
            .map(|(name, value)| match unsupported::instead_of(name) {
                Some(instead) => format!("--{name}={value} has no effect: {instead}"),
                None => format!("--{name}={value} is accepted but has no effect yet"),
            })
            .collect();
        if self.offloads_on_eviction && !self.has_offload {
            warnings.push("--offload_on_evict has no effect without --enable_offload".to_owned());
        }
        if self.cluster.is_member && self.has_metadata {
            warnings.push(
                "--enable_http_metadata_server: each master has metadata of its own, which is lost with \
                 it; name another metadata server, or P2PHANDSHAKE"
                    .to_owned(),
            );
        }
        if self.is_metadata_cleaned && !self.has_metadata {
            warnings.push(
                "--enable_metadata_cleanup_on_timeout has no effect without \
                 --enable_http_metadata_server: only the embedded server is cleaned"
                    .to_owned(),
            );
        }
        warnings
    }

    /// Returns the watermark in the form that the option shows.
    fn watermark(&self) -> f64 {
        self.eviction_watermark.unwrap_or(WATERMARK)
    }
}

/// Reads a command line with its flag files and its configuration file, and checks the result.
///
/// # Errors
/// An option is unknown, unreadable or out of range; the message names it.
pub fn from_arguments(arguments: Vec<String>) -> Result<CliCommand<Box<MasterConfig>>> {
    CliCommand::read(OPTIONS, arguments)?.and_then(|assignments| {
        let path = assignments.iter().rev().find(|(name, _)| *name == "config_path");
        let entries = match path {
            Some((_, path)) if !path.is_empty() => file::read(path)?,
            _ => Vec::new(),
        };
        let mut config: MasterConfig = resolve(OPTIONS, &entries, env::EnvVar::read, &assignments)?;
        if config.rpc_token.is_none() {
            config.rpc_token = token::from_environment()?;
        }
        if config.cluster.is_member {
            config.cluster.redis = cluster::redis_login()?;
        }
        config.check()?;
        Ok(Box::new(config))
    })
}

#[cfg(test)]
mod tests;
