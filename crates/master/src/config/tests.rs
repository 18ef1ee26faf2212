//! The table of options against upstream's defaults, and the rules between options.

use std::fs;

use super::*;
use crate::state::OffloadRules;

fn parse(line: &str) -> Result<MasterConfig> {
    match from_arguments(line.split_whitespace().map(str::to_owned).collect())? {
        CliCommand::Run(config) => Ok(*config),
        other => panic!("{line}: {other:?}"),
    }
}

#[test]
fn every_option_is_unique_and_documented() {
    let mut names: Vec<&str> = Vec::new();
    for spec in OPTIONS {
        names.push(spec.name);
        names.extend(spec.aliases);
        assert!(spec.help.ends_with('.'), "{}", spec.name);
    }
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
}

#[test]
fn every_default_parses_back() {
    let defaults = MasterConfig::default();
    for spec in OPTIONS {
        let shown = (spec.show)(&defaults);
        if shown.is_empty() {
            continue;
        }
        let mut config = MasterConfig::default();
        (spec.set)(&mut config, &shown).unwrap_or_else(|e| panic!("{}: {e}", spec.name));
        assert_eq!((spec.show)(&config), shown, "{}", spec.name);
    }
}

#[test]
fn defaults_match_upstream() {
    let defaults = MasterConfig::default();
    let check = |name: &str, expected: &str| {
        let spec = OPTIONS.iter().find(|spec| spec.name == name).expect(name);
        assert_eq!((spec.show)(&defaults), expected, "{name}");
    };
    check("rpc_port", "0");
    check("port", "50051");
    check("rpc_address", "0.0.0.0");
    check("rpc_thread_num", "0");
    check("max_threads", "16");
    check("rpc_conn_timeout_seconds", "0");
    check("rpc_enable_tcp_no_delay", "true");
    check("metrics_host", "0.0.0.0");
    check("metrics_port", "9003");
    check("enable_metric_reporting", "true");
    check("enable_http_metadata_server", "false");
    check("http_metadata_server_host", "0.0.0.0");
    check("http_metadata_server_port", "8080");
    check("enable_metadata_cleanup_on_timeout", "false");
    check("default_kv_lease_ttl", "10000");
    check("default_kv_soft_pin_ttl", "1800000");
    check("max_kv_soft_pin_ttl", "86400000");
    check("allow_evict_soft_pinned_objects", "true");
    check("eviction_ratio", "0.05");
    check("eviction_high_watermark_ratio", "0.9");
    check("client_ttl", "10");
    check("put_start_discard_timeout_sec", "30");
    check("put_start_release_timeout_sec", "600");
    check("memory_allocator", "offset");
    check("allocation_strategy", "random");
    check("cluster_id", "mooncake_cluster");
    check("global_file_segment_size", "9223372036854775807");
    check("offloading_queue_limit", "50000");
    check("promotion_on_hit", "false");
    check("promotion_admission_threshold", "2");
    check("promotion_queue_limit", "50000");
    check("snapshot_interval_seconds", "600");
    check("kv_events_queue_capacity", "65536");
}

#[test]
fn rpc_port_honours_both_names() {
    let check = |line: &str, port: u16| {
        assert_eq!(parse(line).unwrap().effective_rpc_port(), port, "{line}");
    };
    check("", 50051);
    check("--port 7", 7);
    check("-rpc_port=7", 7);
    check("--rpc_port=7 --port=8", 7);
    check("--rpc_port=0 --port=8", 8);
    check("--rpc_port=0", 0);
    check("--port=0", 0);
}

#[test]
fn parses_durations_like_upstream() {
    let config = parse("--default_kv_lease_ttl=500ms --default_kv_soft_pin_ttl 30m --client_ttl=3");
    let config = config.unwrap();
    assert_eq!(config.lease_ttl, Duration::from_millis(500));
    assert_eq!(config.soft_pin_ttl, Duration::from_secs(1800));
    assert_eq!(config.client_ttl, Duration::from_secs(3));
    assert_eq!(parse("--client_active_ttl_sec=4").unwrap().client_ttl, Duration::from_secs(4));
    assert_eq!(parse("--default_kv_lease_ttl=5000").unwrap().lease_ttl, Duration::from_secs(5));
}

#[test]
fn invalid_value_error_names_option() {
    for (line, name) in [
        ("--eviction_ratio=1.5", "eviction_ratio"),
        ("--eviction_ratio=-0.1", "eviction_ratio"),
        ("--eviction_ratio=nan", "eviction_ratio"),
        ("--eviction_high_watermark_ratio=2", "eviction_high_watermark_ratio"),
        ("--memory_allocator=slab", "memory_allocator"),
        ("--allocation_strategy=best", "allocation_strategy"),
        ("--cluster_id=a/b", "cluster_id"),
        ("--client_ttl=0", "client_ttl"),
        ("--enable_ha", "--ha_backend_connstring"),
        ("--enable_ha --ha_backend_type=redis --etcd_endpoints=a:1", "--ha_backend_connstring"),
        ("--enable_ha --etcd_endpoints=a:1 --in_sync_copies=0", "in_sync_copies"),
        ("--enable_ha --etcd_endpoints=a:1 --in_sync_timeout_ms=1", "in_sync_timeout_ms"),
        ("--enable_ha --etcd_endpoints=a:1 --on_log_failure=continue", "on_log_failure"),
        ("--enable_ha --etcd_endpoints=a:1 --ha_backend_type=zookeeper", "ha_backend_type"),
        ("--tenant_eviction_high_watermark_ratio=2", "tenant_eviction_high_watermark_ratio"),
        ("--root_fs_dir=/mnt/shared", "--enable_offload"),
        ("--offload_cap_ratio=2", "offload_cap_ratio"),
        ("--offload_cap_ratio=nan", "offload_cap_ratio"),
        ("--offloading_queue_limit=0", "offloading_queue_limit"),
        ("--promotion_admission_threshold=0", "promotion_admission_threshold"),
        ("--promotion_admission_threshold=256", "promotion_admission_threshold"),
        ("--rpc_port=70000", "rpc_port"),
        ("--rpc_port=x", "rpc_port"),
        ("--max_kv_soft_pin_ttl=1s", "default_kv_soft_pin_ttl"),
    ] {
        let error = parse(line).expect_err(line).to_string();
        assert!(error.contains(name), "{line}: {error}");
    }
    let stray = parse("50051").unwrap_err().to_string();
    assert!(stray.contains("50051"), "{stray}");
}

#[test]
fn options_of_disks_become_rules() {
    assert_eq!(parse("--offload_on_evict").unwrap().rules().offload, None);
    let line = "--enable_offload --offload_on_evict --offload_force_evict \
        --offloading_queue_limit=10 --offload_cap_ratio=0.25";
    let expected = OffloadRules {
        queue_max: 10,
        adopts_records: false,
        is_on_eviction: true,
        drops_when_full: true,
        moves_max: 3,
    };
    assert_eq!(parse(line).unwrap().rules().offload, Some(expected));
    let written = parse("--enable_offload").unwrap().rules().offload;
    assert_eq!(written, Some(OffloadRules::default()));
}

#[test]
fn warns_only_about_ineffective_options() {
    let check = |line: &str, expected: &[&str]| {
        let warnings = parse(line).unwrap().warnings();
        assert_eq!(warnings.len(), expected.len(), "{line}: {warnings:?}");
        for (warning, name) in warnings.iter().zip(expected) {
            assert!(warning.contains(name), "{line}: {warnings:?}");
        }
    };
    check("", &[]);
    check("--noenable_offload --logtostderr --v=1 --memory_allocator=cachelib", &[]);
    check("--offload_on_evict --enable_offload --offload_force_evict", &[]);
    check("--offload_on_evict", &["--enable_offload"]);
    check("--snapshot_interval_seconds=5", &[]);
    check("--enable_snapshot --snapshot_interval_seconds=5", &["enable_snapshot", "interval"]);
    check("--client_suspicion_ttl_sec=60", &["expires after --client_ttl"]);
    check("--enable_snapshot_restore", &["goes on from the log in its --state_dir"]);
    check("--snapshot_chunk_object_count=5", &[]);
    let line = "--enable_oplog_snapshot --tenant_eviction_high_watermark_ratio=0.8";
    check(line, &["enable_oplog_snapshot=true has no effect", "when the quota is used up"]);
    check("--dynamic_replication_mode=enforce", &["dynamic_replication_mode=enforce"]);
    check("--enable_metadata_cleanup_on_timeout", &["enable_http_metadata_server"]);
}

#[test]
fn watermark_applies_only_when_given() {
    assert_eq!(parse("").unwrap().eviction_watermark, None);
    let given = parse("--eviction_high_watermark_ratio=0.9").unwrap();
    assert_eq!(given.eviction_watermark, Some(0.9));
}

#[test]
fn flags_override_file_and_file_overrides_defaults() {
    let folder = tempfile::tempdir().unwrap();
    let yaml = folder.path().join("master.yaml");
    fs::write(&yaml, "rpc_port: 7\nclient_live_ttl_sec: 60\neviction_ratio: 0.1\n").unwrap();
    let config = parse(&format!("--eviction_ratio=0.2 --config_path={}", yaml.display())).unwrap();
    assert_eq!((config.effective_rpc_port(), config.eviction_ratio), (7, 0.2));
    assert_eq!(config.client_ttl, Duration::from_secs(60));

    let json = folder.path().join("master.json");
    fs::write(&json, r#"{"rpc_port": 8, "enable_http_metadata_server": true}"#).unwrap();
    let config = parse(&format!("--config_path {}", json.display())).unwrap();
    assert_eq!((config.effective_rpc_port(), config.has_metadata), (8, true));

    fs::write(&json, r#"{"rpc_prt": 8}"#).unwrap();
    let error = parse(&format!("--config_path {}", json.display())).unwrap_err().to_string();
    assert!(error.contains("rpc_prt") && error.contains("rpc_port"), "{error}");
    let error = parse("--config_path=/nowhere/master.json").unwrap_err().to_string();
    assert!(error.contains("/nowhere/master.json"), "{error}");
}

#[test]
fn default_threads_are_four_or_fewer_cores() {
    let check = |line: &str, cores, threads| {
        assert_eq!(parse(line).unwrap().effective_threads(cores), threads, "{line}");
    };
    check("", 2, 2);
    check("", 64, 4);
    check("--rpc_thread_num=9", 2, 9);
    check("--max_threads=1", 64, 1);
}

#[test]
fn token_is_not_printed() {
    let config = parse("--admin_token=s3cret").unwrap();
    assert!(config.admin_token.is(b"s3cret"));
    assert!(!format!("{config:?}").contains("s3cret"));
    assert!(OPTIONS.iter().all(|spec| !(spec.show)(&config).contains("s3cret")));
}

#[test]
fn rpc_token_comes_from_its_file_and_is_not_printed() {
    assert_eq!(parse("--rpc_token_file=").unwrap().rpc_token, None);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    fs::write(&path, "open sesame\n").unwrap();
    let line = format!("--rpc_token_file={}", path.display());
    let config = parse(&line).unwrap();
    assert!(config.rpc_token.as_ref().unwrap().is(b"open sesame"));
    assert!(!format!("{config:?}").contains("sesame"));
    assert!(OPTIONS.iter().all(|spec| !(spec.show)(&config).contains("sesame")));
    fs::write(&path, "short\n").unwrap();
    let error = parse(&line).unwrap_err().to_string();
    assert!(error.contains("rpc_token_file") && error.contains("8 bytes"), "{error}");
    assert!(!error.contains("short"), "{error}");
    assert!(parse("--rpc_token_file=/nowhere/token").is_err());
}

#[test]
fn accepts_every_upstream_flag() {
    let names = "rpc_port port rpc_address rpc_interface rpc_thread_num max_threads \
        rpc_conn_timeout_seconds rpc_enable_tcp_no_delay metrics_host metrics_port \
        enable_metric_reporting enable_http_metadata_server http_metadata_server_host \
        http_metadata_server_port enable_metadata_cleanup_on_timeout default_kv_lease_ttl \
        default_kv_soft_pin_ttl max_kv_soft_pin_ttl allow_evict_soft_pinned_objects \
        eviction_ratio eviction_high_watermark_ratio nof_eviction_ratio \
        nof_eviction_high_watermark_ratio client_ttl put_start_discard_timeout_sec \
        put_start_release_timeout_sec memory_allocator allocation_strategy enable_cxl cxl_path \
        cxl_size cluster_id root_fs_dir global_file_segment_size quota_bytes \
        enable_disk_eviction enable_offload offload_on_evict offload_force_evict \
        offloading_queue_limit offload_cap_ratio promotion_on_hit promotion_admission_threshold \
        promotion_max_per_heartbeat promotion_queue_limit dynamic_replication_mode \
        dynamic_replication_heat_window_seconds dynamic_replication_admission_qps_threshold \
        dynamic_replication_max_memory_replicas enable_multi_tenants tenant_quota_connector_type \
        tenant_quota_connector_uri max_total_finished_tasks max_total_pending_tasks \
        max_total_processing_tasks pending_task_timeout_sec processing_task_timeout_sec \
        max_retry_attempts enable_ha ha_backend_type ha_backend_connstring etcd_endpoints pod_name \
        pod_namespace enable_oplog oplog_batch_max_entries oplog_poll_interval_ms \
        batch_oplog_retry_timeout_sec enable_snapshot snapshot_interval_seconds \
        snapshot_child_timeout_seconds snapshot_retention_count snapshot_object_store_type \
        snapshot_payload_store_type snapshot_payload_backend_type snapshot_catalog_store_type \
        snapshot_catalog_store_connstring snapshot_catalog_backend_type \
        snapshot_catalog_backend_connstring snapshot_backup_dir enable_snapshot_restore \
        nof_heartbeat_interval_sec nof_heartbeat_probe_timeout_ms nof_heartbeat_failures_threshold \
        enable_kv_events kv_events_bind_endpoint kv_events_backend_id kv_events_emit_object_key \
        kv_events_emit_legacy_compat kv_events_queue_capacity kv_events_model_name \
        kv_events_tenant_id kv_events_additional_salt kv_events_lora_name kv_events_block_size \
        client_active_ttl_sec client_suspicion_ttl_sec enable_oplog_snapshot \
        snapshot_chunk_object_count tenant_eviction_high_watermark_ratio \
        kv_events_dp_rank mmap_arena_pool_size use_mmap_arena_allocator config_path logtostderr \
        alsologtostderr log_dir minloglevel stderrthreshold max_log_size v vmodule";
    for name in names.split_whitespace() {
        let is_known = OPTIONS.iter().any(|spec| spec.name == name || spec.aliases.contains(&name));
        assert!(is_known, "{name}");
    }
}
