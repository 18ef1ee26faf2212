//! The table of options: flags, file keys and help texts from one declaration.

use std::{path::PathBuf, time::Duration};

use mooncake_base::{
    Error, Result,
    env::{self, EnvVar},
    options::OptionSpec,
    parse::{read_bool, read_millis, read_number, read_seconds},
};

use super::{LeaseBackend, MasterConfig, RPC_PORT, Secret, StateDir};
use crate::{
    journal::{LogSync, OnLogFailure},
    state::{AllocationStrategy, EvictionKind},
};

type Spec = OptionSpec<MasterConfig>;
type Setter = fn(&mut MasterConfig, &str) -> Result<()>;
type Show = fn(&MasterConfig) -> String;

const fn value(name: &'static str, help: &'static str, set: Setter, show: Show) -> Spec {
    OptionSpec { name, aliases: &[], env: None, is_switch: false, help, set, show }
}

const fn switch(name: &'static str, help: &'static str, set: Setter, show: Show) -> Spec {
    OptionSpec { name, aliases: &[], env: None, is_switch: true, help, set, show }
}

const fn with_aliases(spec: Spec, aliases: &'static [&'static str]) -> Spec {
    OptionSpec { aliases, ..spec }
}

const fn with_env(spec: Spec, variable: &'static EnvVar) -> Spec {
    OptionSpec { env: Some(variable), ..spec }
}

/// Declares an option of an unsupported feature. A macro, because `set` and `show` are plain
/// functions that must know the option's name.
macro_rules! unsupported {
    ($name:literal, $default:literal, $help:literal) => {
        value(
            $name,
            concat!("(no effect) ", $help),
            |c, t| set_unsupported(c, $name, t.to_owned()),
            |c| show_unsupported(c, $name, $default),
        )
    };
    ($name:literal, $default:literal, $help:literal, switch) => {
        switch(
            $name,
            concat!("(no effect) ", $help),
            |c, t| read_bool(t).and_then(|on| set_unsupported(c, $name, on.to_string())),
            |c| show_unsupported(c, $name, $default),
        )
    };
    ($name:literal, $default:literal, $help:literal, $number:ty) => {
        value(
            $name,
            concat!("(no effect) ", $help),
            |c, t| read_number::<$number>(t).and_then(|n| set_unsupported(c, $name, n.to_string())),
            |c| show_unsupported(c, $name, $default),
        )
    };
    ($name:literal, $default:literal, $help:literal, one_of $choices:expr) => {
        value(
            $name,
            concat!("(no effect) ", $help),
            |c, t| one_of(t, $choices).and_then(|t| set_unsupported(c, $name, t.to_owned())),
            |c| show_unsupported(c, $name, $default),
        )
    };
}

/// Every option of the master, in the order of the help text.
#[rustfmt::skip] // A table: one option a line where it fits.
pub const OPTIONS: &[Spec] = &[
    value("config_path", "A configuration file, .json or flat .yaml, with the names of the flags.",
        |c, t| { t.clone_into(&mut c.config_path); Ok(()) }, |c| c.config_path.clone()),
    value("rpc_port", "The RPC port, 50051 by default; 0 takes --port if it is given, and a free port otherwise.",
        |c, t| read_number(t).map(|n| c.rpc_port = Some(n)),
        |c| c.rpc_port.unwrap_or(0).to_string()),
    value("port", "The older name of --rpc_port.",
        |c, t| read_number(t).map(|n| c.port = Some(n)),
        |c| c.port.unwrap_or(RPC_PORT).to_string()),
    value("rpc_address", "The address that the RPC port binds: an IPv4 or IPv6 address, or a name.",
        |c, t| text(t, &mut c.rpc_address), |c| c.rpc_address.clone()),
    value("rpc_interface", "Binds the IPv4 address of this network interface instead of --rpc_address.",
        |c, t| { t.clone_into(&mut c.rpc_interface); Ok(()) }, |c| c.rpc_interface.clone()),
    value("rpc_thread_num", "Number of runtime threads; 0 takes four, or one per core if there are fewer.",
        |c, t| read_number(t).map(|n| c.rpc_threads = n), |c| c.rpc_threads.to_string()),
    value("max_threads", "Maximum number of runtime threads when --rpc_thread_num is 0; an older option.",
        |c, t| read_number(t).map(|n| c.threads_max = Some(n)),
        |c| c.threads_max.unwrap_or(16).to_string()),
    value("rpc_conn_timeout_seconds",
        "Idle timeout of RPC connections in seconds; 0: none, but ten minutes for those of HTTP/2.",
        |c, t| read_seconds(t).map(|d| c.rpc_idle_timeout = d),
        |c| c.rpc_idle_timeout.as_secs().to_string()),
    switch("rpc_enable_tcp_no_delay", "Sets TCP_NODELAY on RPC connections.",
        |c, t| read_bool(t).map(|on| c.is_tcp_nodelay = on), |c| c.is_tcp_nodelay.to_string()),
    value("rpc_token_file", "A file with the token that callers of the RPC port must know, of at least 8 bytes; \
         takes precedence over MOONCAKE_MASTER_TOKEN. Others get the master's health and nothing else.",
        super::token::set_from_file, |_| String::new()),
    value("metrics_host", "The address that the admin port binds.",
        |c, t| text(t, &mut c.admin_host), |c| c.admin_host.clone()),
    value("metrics_port", "The admin port; 0 takes a free one. Not given: 9003, or a free one if that is taken.",
        |c, t| read_number(t).map(|n| c.admin_port = Some(n)),
        |c| c.admin_port.unwrap_or(super::ADMIN_PORT).to_string()),
    value("admin_hosts", "Names under which browsers may read the admin port, separated by commas, besides IP \
         addresses, localhost and the name of this host. Other programs may use any name.",
        |c, t| { c.admin_hosts = t.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect(); Ok(()) },
        |c| c.admin_hosts.join(",")),
    switch("upstream_metrics", "Serves upstream's metric names at /metrics, too, beside those that begin with mooncake_master_.",
        |c, t| read_bool(t).map(|on| c.has_upstream_metrics = on), |c| c.has_upstream_metrics.to_string()),
    switch("enable_metric_reporting", "Logs a summary line every ten seconds (level info).",
        |c, t| read_bool(t).map(|on| c.is_reporting = on), |c| c.is_reporting.to_string()),
    with_env(value("admin_token", "The token that allows changes through the admin port from other hosts, sent as \
         `Authorization: Bearer TOKEN`; peers on this host need no token, unless the RPC port has one.",
        |c, t| { c.admin_token = Secret::new(t); Ok(()) }, |_| String::new()), &env::MOONCAKE_ADMIN_TOKEN),
    value("ports_file", "A file that the bound addresses are written to, as JSON, once the master is ready.",
        |c, t| { t.clone_into(&mut c.ports_file); Ok(()) }, |c| c.ports_file.clone()),
    value("slow_call_ms", "Duration in milliseconds from which on a call is recorded as slow; 0 records none.",
        |c, t| read_millis(t).map(|d| c.slow_call = d), |c| millis(c.slow_call)),
    switch("enable_http_metadata_server", "Serves the metadata of transfer engines over HTTP.",
        |c, t| read_bool(t).map(|on| c.has_metadata = on), |c| c.has_metadata.to_string()),
    value("http_metadata_server_host", "The address that the metadata port binds.",
        |c, t| text(t, &mut c.metadata_host), |c| c.metadata_host.clone()),
    value("http_metadata_server_port", "The metadata port; 0 takes a free one.",
        |c, t| read_number(t).map(|n| c.metadata_port = n), |c| c.metadata_port.to_string()),
    switch("enable_metadata_cleanup_on_timeout", "Deletes the metadata of expired clients from the embedded metadata server.",
        |c, t| read_bool(t).map(|on| c.is_metadata_cleaned = on),
        |c| c.is_metadata_cleaned.to_string()),
    value("default_kv_lease_ttl", "Duration of the lease that a read or a probe grants: milliseconds, or with ms, s, m, h.",
        |c, t| read_millis(t).map(|d| c.lease_ttl = d), |c| millis(c.lease_ttl)),
    value("default_kv_soft_pin_ttl", "Default duration of a soft pin: milliseconds, or with ms, s, m, h.",
        |c, t| read_millis(t).map(|d| c.soft_pin_ttl = d), |c| millis(c.soft_pin_ttl)),
    value("max_kv_soft_pin_ttl", "Maximum duration of a soft pin: milliseconds, or with ms, s, m, h.",
        |c, t| read_millis(t).map(|d| c.soft_pin_ttl_max = d), |c| millis(c.soft_pin_ttl_max)),
    switch("allow_evict_soft_pinned_objects", "Evicts soft-pinned objects when nothing else can be evicted.",
        |c, t| read_bool(t).map(|on| c.is_soft_pin_evictable = on),
        |c| c.is_soft_pin_evictable.to_string()),
    value("eviction_ratio", "The share of objects that one round of eviction takes, 0 to 1.",
        |c, t| read_number(t).map(|n| c.eviction_ratio = n), |c| c.eviction_ratio.to_string()),
    value("eviction_high_watermark_ratio",
        "Pool usage, 0 to 1, above which objects are evicted in the background; 1 disables it. Not given: \
         objects are evicted only when a put needs space.",
        |c, t| read_number(t).map(|n| c.eviction_watermark = Some(n)), |c| c.watermark().to_string()),
    value("eviction_policy", "Eviction policy: adaptive (combines recency and frequency, and chooses between policies by their measured hit rate), lru or s3fifo.",
        |c, t| parse_choice(EVICTIONS, t).map(|kind| c.eviction = kind), |c| choice_name(EVICTIONS, c.eviction)),
    with_aliases(value("client_ttl", "Seconds without a heartbeat after which a client expires.",
        |c, t| read_seconds(t).map(|d| c.client_ttl = d), |c| c.client_ttl.as_secs().to_string()),
        &["client_active_ttl_sec", "client_live_ttl_sec"]),
    value("put_start_discard_timeout_sec", "Seconds after which an unfinished put may be displaced by another.",
        |c, t| read_seconds(t).map(|d| c.put_discard_timeout = d),
        |c| c.put_discard_timeout.as_secs().to_string()),
    value("put_start_release_timeout_sec", "Seconds after which the memory of an unfinished put is reused; at least as long as its bytes may still arrive (32 with the other defaults).",
        |c, t| read_seconds(t).map(|d| c.put_release_timeout = d),
        |c| c.put_release_timeout.as_secs().to_string()),
    value("max_objects_per_tenant", "Maximum number of objects of a tenant; without tenants, of the pool. More are refused: each takes memory of the master, however small it is.",
        |c, t| read_number(t).map(|n| c.objects_per_tenant_max = n),
        |c| c.objects_per_tenant_max.to_string()),
    value("max_unfinished_puts_per_client", "Maximum number of puts that a client has started and not ended; more are refused.",
        |c, t| read_number(t).map(|n| c.unfinished_puts_per_client_max = n),
        |c| c.unfinished_puts_per_client_max.to_string()),
    value("allocation_strategy", "Allocation strategy, by which segments are chosen: random, free_ratio_first, local_first, cxl (segments of that protocol first) or ssd_free_ratio_first (by free memory, as no disk usage is reported).",
        |c, t| parse_choice(ALLOCATIONS, t).map(|way| c.allocation = way), |c| choice_name(ALLOCATIONS, c.allocation)),
    value("cluster_id", "The name of the cluster: letters, digits, '_', '.', '-'.",
        |c, t| { t.clone_into(&mut c.cluster_id); Ok(()) }, |c| c.cluster_id.clone()),
    switch("enable_multi_tenants", "Gives each tenant its own keys; only tenants with a quota may write, up to the quota. Needs --tenant_quota_connector_uri.",
        |c, t| read_bool(t).map(|on| c.is_multi_tenant = on), |c| c.is_multi_tenant.to_string()),
    value("tenant_quota_connector_uri", "The YAML file of the tenants' quotas; the master rewrites it when quotas change.",
        |c, t| { t.strip_prefix("file://").unwrap_or(t).clone_into(&mut c.tenant_policy); Ok(()) },
        |c| c.tenant_policy.clone()),
    value("max_total_finished_tasks", "Maximum number of finished copies and moves whose status is kept.",
        |c, t| read_number(t).map(|n: u32| c.tasks.finished_max = n as usize),
        |c| c.tasks.finished_max.to_string()),
    value("max_total_pending_tasks", "Maximum number of pending copies and moves; more are refused.",
        |c, t| read_number(t).map(|n: u32| c.tasks.pending_max = n as usize),
        |c| c.tasks.pending_max.to_string()),
    value("max_total_processing_tasks", "Maximum number of copies and moves in progress.",
        |c, t| read_number(t).map(|n: u32| c.tasks.processing_max = n as usize),
        |c| c.tasks.processing_max.to_string()),
    value("pending_task_timeout_sec", "Seconds that a copy or move may wait for a client; 0 is unlimited.",
        |c, t| read_seconds(t).map(|d| c.tasks.pending_timeout = d),
        |c| c.tasks.pending_timeout.as_secs().to_string()),
    value("processing_task_timeout_sec", "Seconds after which a copy or move that has started is no longer retried; 0 is unlimited.",
        |c, t| read_seconds(t).map(|d| c.tasks.processing_timeout = d),
        |c| c.tasks.processing_timeout.as_secs().to_string()),
    value("max_retry_attempts", "Maximum number of retries of a copy or move.",
        |c, t| read_number(t).map(|n| c.tasks.retries_max = n), |c| c.tasks.retries_max.to_string()),
    with_env(value("state_dir", "The directory of the master's log, from which a restart recovers all objects: a \
         path, `none` or empty for no log, `default` for a directory named by cluster id and port under \
         $XDG_STATE_HOME/mooncake or ~/.local/state/mooncake (no log with port 0).",
        set_state_dir, show_state_dir), &env::MOONCAKE_STATE_DIR),
    value("log_sync", "When the log is synced to disk: always (before each reply), never, or at an interval such as \
         `1s` or `200ms`. It is written to the page cache before each reply in any case.",
        set_log_sync, show_log_sync),
    with_env(value("on_log_failure", "What the master does when the log cannot be written, as on a full disk. stop: it refuses all \
         calls and ends; the log has everything that was acknowledged. continue: it makes the log void and goes on \
         from memory, and what is acknowledged until a new log has begun is lost in a restart. auto: stop with \
         --log_sync=always, continue otherwise.",
        |c, t| parse_choice(ON_LOG_FAILURE, t).map(|choice| c.on_log_failure = choice),
        |c| choice_name(ON_LOG_FAILURE, c.on_log_failure)), &env::MOONCAKE_ON_LOG_FAILURE),
    value("resume_grace", "How long calls wait for clients that may come back: after a restart for those that the log \
         knows, after a pause of the master for those that hung up meanwhile. Milliseconds, or with ms, s, m, h.",
        |c, t| read_millis(t).map(|d| c.resume_grace = d), |c| millis(c.resume_grace)),

    switch("enable_ha", "Makes this master one of several: it follows the log of the one that leads, and leads in its \
         turn. Needs --state_dir and --ha_backend_connstring.",
        |c, t| read_bool(t).map(|on| c.cluster.is_member = on), |c| c.cluster.is_member.to_string()),
    value("ha_backend_type", "The service that elects the leader: etcd, redis or k8s.",
        |c, t| parse_choice(BACKENDS, t).map(|kind| c.cluster.backend = kind), |c| choice_name(BACKENDS, c.cluster.backend)),
    value("ha_backend_connstring", "Where that service is: members of etcd separated by ';', host:port of a Redis server, or \
         [namespace/]lease of Kubernetes.",
        |c, t| { t.clone_into(&mut c.cluster.connection); Ok(()) }, |c| c.cluster.connection.clone()),
    value("etcd_endpoints", "The older form of --ha_backend_connstring: members of etcd, separated by ';'.",
        |c, t| { t.clone_into(&mut c.cluster.etcd_endpoints); Ok(()) }, |c| c.cluster.etcd_endpoints.clone()),
    value("ha_lease_ttl", "Duration of the leader's lease, 1s to 3600s: seconds, or with ms, s, m, h. Another master leads this \
         long after the leader is gone.",
        |c, t| read_seconds(t).map(|d| c.cluster.lease_ttl = d), |c| c.cluster.lease_ttl.as_secs().to_string()),
    value("in_sync_copies", "Number of masters, the leader included, that have every change before it is acknowledged, 1 to 16.",
        |c, t| read_number(t).map(|n| c.cluster.copies = n), |c| c.cluster.copies.to_string()),
    value("in_sync_timeout_ms", "Milliseconds without a confirmation after which a standby is taken out of those masters.",
        |c, t| read_millis(t).map(|d| c.cluster.in_sync_timeout = d), |c| millis(c.cluster.in_sync_timeout)),
    switch("force_leader", "Lets this master lead as soon as no other does, although it may lack changes: an operator's word \
         after the lease service lost its values, or after the other masters are gone for good.",
        |c, t| read_bool(t).map(|on| c.cluster.is_forced = on), |c| c.cluster.is_forced.to_string()),
    value("check_promotable", "Asks the master with this admin port, as host or host:port, whether it leads or could lead next, \
         and serves nothing; the exit code is 0 only if it does or could.",
        |c, t| { t.clone_into(&mut c.check_promotable); Ok(()) }, |c| c.check_promotable.clone()),
    value("advertise_address", "The address at which clients and other masters reach this one, as host or host:port; by \
         default that of the RPC port.",
        |c, t| { t.clone_into(&mut c.cluster.advertised); Ok(()) }, |c| c.cluster.advertised.clone()),
    with_env(value("pod_name", "Name of the pod of this master. With --ha_backend_type=k8s the pod has the label \
         mooncake.io/store-role=leader while it leads.",
        |c, t| { t.clone_into(&mut c.cluster.pod_name); Ok(()) }, |c| c.cluster.pod_name.clone()), &env::POD_NAME),
    with_env(value("pod_namespace", "Namespace of the pod of this master, and of the Lease unless --ha_backend_connstring names \
         another; 'default' if it is not given.",
        |c, t| { t.clone_into(&mut c.cluster.pod_namespace); Ok(()) }, |c| c.cluster.pod_namespace.clone()), &env::POD_NAMESPACE),
    switch("enable_kv_events", "Publishes object events over ZeroMQ; needs --kv_events_bind_endpoint and --kv_events_backend_id.",
        |c, t| read_bool(t).map(|on| c.events.is_on = on), |c| c.events.is_on.to_string()),
    value("kv_events_bind_endpoint", "The endpoint of the event publisher: tcp://HOST:PORT, `*` for any host or any free port.",
        |c, t| { t.clone_into(&mut c.events.endpoint); Ok(()) }, |c| c.events.endpoint.clone()),
    value("kv_events_backend_id", "The name of this master in events.",
        |c, t| { t.clone_into(&mut c.events.backend_id); Ok(()) }, |c| c.events.backend_id.clone()),
    switch("kv_events_emit_object_key", "Names the object in events. If off, only `cleared` events are published.",
        |c, t| read_bool(t).map(|on| c.events.has_object_key = on),
        |c| c.events.has_object_key.to_string()),
    switch("kv_events_emit_legacy_compat", "Adds the older names of fields (type, block_hashes, parent_block_hash).",
        |c, t| read_bool(t).map(|on| c.events.has_legacy = on), |c| c.events.has_legacy.to_string()),
    value("kv_events_queue_capacity", "Maximum number of queued events; beyond it, the oldest are dropped. 0: about 16 million.",
        |c, t| read_number(t).map(|n| c.events.capacity = n), |c| c.events.capacity.to_string()),
    value("kv_events_model_name", "Copied into every event as model_name.",
        |c, t| { t.clone_into(&mut c.events.model_name); Ok(()) }, |c| c.events.model_name.clone()),
    value("kv_events_additional_salt", "Copied into every event as additional_salt.",
        |c, t| { t.clone_into(&mut c.events.additional_salt); Ok(()) },
        |c| c.events.additional_salt.clone()),
    value("kv_events_lora_name", "Copied into every event as lora_name.",
        |c, t| { t.clone_into(&mut c.events.lora_name); Ok(()) }, |c| c.events.lora_name.clone()),
    value("kv_events_block_size", "Copied into every event as block_size; 0 is nil.",
        |c, t| read_number(t).map(|n| c.events.block_size = n), |c| c.events.block_size.to_string()),
    value("kv_events_dp_rank", "Copied into every event and message as dp_rank.",
        |c, t| read_number(t).map(|n| c.events.dp_rank = n), |c| c.events.dp_rank.to_string()),
    unsupported!("kv_events_tenant_id", "default", "Ignored: the tenant of an event is the tenant of its object."),

    // Options that are accepted without effect.
    unsupported!("memory_allocator", "offset", "offset or cachelib; both select the same allocator.", one_of &["offset", "cachelib"]),
    unsupported!("client_suspicion_ttl_sec", "20", "Seconds until a client that is silent for --client_ttl expires. Here it \
         expires after --client_ttl; until then its objects are kept, and reads turn to other copies.", u64),
    unsupported!("nof_eviction_ratio", "0.05", "Eviction ratio of the NVMe-oF tier.", f64),
    unsupported!("nof_eviction_high_watermark_ratio", "0.9", "Watermark of the NVMe-oF tier.", f64),
    unsupported!("nof_heartbeat_interval_sec", "10", "Heartbeat of NVMe-oF segments.", i64),
    unsupported!("nof_heartbeat_probe_timeout_ms", "1000", "Timeout of a probe of an NVMe-oF segment.", u32),
    unsupported!("nof_heartbeat_failures_threshold", "3", "Failed probes until an NVMe-oF segment is given up.", u32),
    unsupported!("enable_cxl", "false", "Use of CXL memory.", switch),
    unsupported!("cxl_path", "/dev/dax0.0", "The CXL device."),
    unsupported!("cxl_size", "8589934592", "Bytes of CXL memory.", u64),
    unsupported!("root_fs_dir", "", "A directory that hosts share. Refused at the start; see --enable_offload."),
    unsupported!("global_file_segment_size", "9223372036854775807", "Ignored: capacity of --root_fs_dir.", i64),
    unsupported!("tenant_eviction_high_watermark_ratio", "0.9", "Share of its quota from which on objects of a tenant are evicted. \
         Here a put evicts objects of its tenant when the quota is used up.", f64),
    unsupported!("quota_bytes", "0", "Quota of the storage backend.", u64),
    unsupported!("enable_disk_eviction", "true", "Eviction from the storage backend.", switch),
    switch("enable_offload", "Writes objects to the directories that clients keep for the pool (enable_ssd_offload, \
         mooncake_client --enable_offload), too: what is evicted from memory stays readable.",
        |c, t| read_bool(t).map(|on| c.has_offload = on), |c| c.has_offload.to_string()),
    switch("adopt_disk_records", "Makes objects of the records that disks have and this master does not know. Without it they \
         are given up: the log of the master that knew them is lost, and removed objects would come back.",
        |c, t| read_bool(t).map(|on| c.adopts_disk_records = on), |c| c.adopts_disk_records.to_string()),
    value("disk_away_ttl", "Seconds for which objects on a disk that no process has open are kept, and hidden.",
        |c, t| read_seconds(t).map(|d| c.disk_away_ttl = d), |c| c.disk_away_ttl.as_secs().to_string()),
    switch("offload_on_evict", "Writes objects to disks when their memory is needed, and not when they are put: the put that needs \
         the memory waits until a disk has them. Needs --enable_offload.",
        |c, t| read_bool(t).map(|on| c.offloads_on_eviction = on), |c| c.offloads_on_eviction.to_string()),
    switch("offload_force_evict", "With --offload_on_evict, drops objects while too many others wait for disks. Off: the puts that \
         need their memory wait for a disk, and fail if that takes too long.",
        |c, t| read_bool(t).map(|on| c.offload_drops_when_full = on), |c| c.offload_drops_when_full.to_string()),
    value("offloading_queue_limit", "Maximum number of objects that wait to be written to disks, 1 to 100000000; more stay in \
         memory only.",
        |c, t| read_number(t).map(|n| c.offload_queue_max = n), |c| c.offload_queue_max.to_string()),
    value("offload_cap_ratio", "The share of --offloading_queue_limit that may wait because of eviction, 0 to 1; with 0, eviction \
         drops objects.",
        |c, t| read_number(t).map(|n| c.offload_cap_ratio = n), |c| c.offload_cap_ratio.to_string()),
    switch("promotion_on_hit", "Brings objects that only a disk has back into memory when they are read. Without it only \
         probes that ask for it and copies do.",
        |c, t| read_bool(t).map(|on| c.promotes_on_hit = on), |c| c.promotes_on_hit.to_string()),
    value("promotion_admission_threshold", "Number of reads within a minute that bring an object back, 1 to 255.",
        |c, t| read_number(t).map(|n| c.promotion_hits_min = n), |c| c.promotion_hits_min.to_string()),
    unsupported!("promotion_max_per_heartbeat", "1", "Maximum number of objects promoted per heartbeat. Here disks are asked \
         at once, and the bytes that are underway are limited.", u32),
    value("promotion_queue_limit", "Maximum number of objects that wait to come back from disk to memory; more stay on disk only.",
        |c, t| read_number(t).map(|n| c.promotion_queue_max = n), |c| c.promotion_queue_max.to_string()),
    unsupported!("dynamic_replication_mode", "off", "off, observe or enforce.", one_of &["off", "observe", "enforce"]),
    unsupported!("dynamic_replication_heat_window_seconds", "10", "Window in which reads are counted.", u32),
    unsupported!("dynamic_replication_admission_qps_threshold", "0.8", "Reads per second that make an object hot.", f64),
    unsupported!("dynamic_replication_max_memory_replicas", "2", "Maximum number of memory replicas of a hot object.", u64),
    unsupported!("tenant_quota_connector_type", "file", "file; etcd is not supported yet.", one_of &["file", "etcd"]),
    unsupported!("enable_oplog", "false", "A log of changes in etcd. Here masters always have a log, which standbys follow.", switch),
    unsupported!("oplog_batch_max_entries", "1024", "Entries of one batch of the log.", u32),
    unsupported!("oplog_poll_interval_ms", "1000", "How often a standby polls the log.", i32),
    unsupported!("batch_oplog_retry_timeout_sec", "180", "Seconds during which a batch of the log is retried.", u32),
    unsupported!("enable_snapshot", "false", "Snapshots of upstream's kind; see --state_dir for the log that replaces them.", switch),
    unsupported!("enable_oplog_snapshot", "false", "Snapshots of the log. Here the log always has snapshots.", switch),
    unsupported!("snapshot_chunk_object_count", "1000000", "Objects in one part of a snapshot.", u64),
    unsupported!("snapshot_interval_seconds", "600", "Seconds between snapshots.", u64),
    unsupported!("snapshot_child_timeout_seconds", "300", "Seconds that a snapshot may take.", u64),
    unsupported!("snapshot_retention_count", "2", "Snapshots that are kept.", u32),
    with_aliases(unsupported!("snapshot_object_store_type", "", "local or s3."),
        &["snapshot_payload_store_type", "snapshot_payload_backend_type"]),
    with_aliases(unsupported!("snapshot_catalog_store_type", "", "embedded or redis."), &["snapshot_catalog_backend_type"]),
    with_aliases(unsupported!("snapshot_catalog_store_connstring", "", "Connection string of the snapshot catalog."),
        &["snapshot_catalog_backend_connstring"]),
    unsupported!("snapshot_backup_dir", "", "An extra local copy of each snapshot."),
    unsupported!("enable_snapshot_restore", "false", "Restore of the latest snapshot of upstream's kind at the start. Here a master \
         always goes on from the log in its --state_dir.", switch),
    unsupported!("mmap_arena_pool_size", "8589934592", "Arena size of the older allocator in bytes.", u64),
    unsupported!("use_mmap_arena_allocator", "false", "Uses the arena of --mmap_arena_pool_size.", switch),

    // The log options of upstream's programs. This program logs to stderr; MC_LOG_LEVEL sets the
    // level.
    unsupported!("logtostderr", "false", "Ignored: the log goes to stderr (see MC_LOG_LEVEL).", switch),
    unsupported!("alsologtostderr", "false", "Ignored.", switch),
    unsupported!("colorlogtostderr", "false", "Ignored.", switch),
    unsupported!("log_dir", "", "Ignored."),
    unsupported!("minloglevel", "0", "Ignored: see MC_LOG_LEVEL.", i32),
    unsupported!("stderrthreshold", "2", "Ignored.", i32),
    unsupported!("max_log_size", "1800", "Ignored.", u32),
    unsupported!("logbufsecs", "30", "Ignored.", i32),
    unsupported!("v", "0", "Ignored: see MC_LOG_LEVEL.", i32),
    unsupported!("vmodule", "", "Ignored."),
];

fn text(from: &str, into: &mut String) -> Result<()> {
    let from = from.trim();
    if from.is_empty() {
        return Err(Error::invalid("the address is empty"));
    }
    from.clone_into(into);
    Ok(())
}

fn millis(duration: Duration) -> String {
    duration.as_millis().to_string()
}

/// The allocation strategies by name.
const ALLOCATIONS: &[(&str, AllocationStrategy)] = &[
    ("random", AllocationStrategy::Random),
    ("free_ratio_first", AllocationStrategy::FreeRatioFirst),
    ("local_first", AllocationStrategy::LocalFirst),
    ("cxl", AllocationStrategy::CxlFirst),
    ("ssd_free_ratio_first", AllocationStrategy::SsdFreeRatioFirst),
];

/// The choices of what happens when the log fails, by name.
const ON_LOG_FAILURE: &[(&str, Option<OnLogFailure>)] = &[
    ("auto", None),
    ("stop", Some(OnLogFailure::Stop)),
    ("continue", Some(OnLogFailure::Continue)),
];

/// The services that elect a leader, by name.
const BACKENDS: &[(&str, LeaseBackend)] = &[
    ("etcd", LeaseBackend::Etcd),
    ("redis", LeaseBackend::Redis),
    ("k8s", LeaseBackend::Kubernetes),
];

/// The eviction policies by name.
const EVICTIONS: &[(&str, EvictionKind)] = &[
    ("adaptive", EvictionKind::Adaptive),
    ("lru", EvictionKind::Lru),
    ("s3fifo", EvictionKind::S3Fifo),
];

fn parse_choice<T: Copy>(choices: &[(&str, T)], text: &str) -> Result<T> {
    let found = choices.iter().find(|(name, _)| *name == text);
    found.map(|(_, choice)| *choice).ok_or_else(|| {
        let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
        Error::invalid("not one of the choices")
            .with("text", format_args!("{text:?}"))
            .with("choices", names.join(","))
    })
}

fn set_state_dir(config: &mut MasterConfig, text: &str) -> Result<()> {
    config.state_dir = match text {
        "" | "none" => StateDir::None,
        "default" => StateDir::Default,
        path => StateDir::At(PathBuf::from(path)),
    };
    Ok(())
}

fn show_state_dir(config: &MasterConfig) -> String {
    match &config.state_dir {
        StateDir::None => "none".to_owned(),
        StateDir::Default => "default".to_owned(),
        StateDir::At(path) => path.display().to_string(),
    }
}

fn set_log_sync(config: &mut MasterConfig, text: &str) -> Result<()> {
    config.log_sync = match text {
        "always" => LogSync::Always,
        "never" => LogSync::Never,
        "interval" => LogSync::Interval(Duration::from_secs(1)),
        time => match read_millis(time)? {
            Duration::ZERO => LogSync::Always,
            interval => LogSync::Interval(interval),
        },
    };
    Ok(())
}

fn show_log_sync(config: &MasterConfig) -> String {
    match config.log_sync {
        LogSync::Always => "always".to_owned(),
        LogSync::Never => "never".to_owned(),
        LogSync::Interval(interval) => format!("{}ms", millis(interval)),
    }
}

fn choice_name<T: PartialEq>(choices: &[(&str, T)], choice: T) -> String {
    let found = choices.iter().find(|(_, other)| *other == choice);
    found.map_or("", |(name, _)| name).to_owned()
}

fn one_of<'a>(text: &'a str, choices: &[&str]) -> Result<&'a str> {
    if choices.contains(&text) {
        return Ok(text);
    }
    Err(Error::invalid("not one of the choices")
        .with("text", format_args!("{text:?}"))
        .with("choices", choices.join(",")))
}

fn set_unsupported(config: &mut MasterConfig, name: &'static str, text: String) -> Result<()> {
    config.unsupported.insert(name, text);
    Ok(())
}

fn show_unsupported(config: &MasterConfig, name: &str, default: &str) -> String {
    config.unsupported.get(name).map_or(default, String::as_str).to_owned()
}
