//! The admin endpoints for drains and quotas in upstream's formats and with its codes.

use std::{
    io::{Read, Write},
    net::TcpStream,
};

use mooncake_master::{MasterConfig, config::StateDir};
use mooncake_proto::columns::Record;
use serde_json::{Value, json};

use crate::support::{Running, eventually, get, http, whole_config};

fn ask(running: &Running, method: &str, target: &str, body: &str) -> (u16, Value) {
    let answer = http(running.admin(), method, target, body.as_bytes());
    (answer.status, answer.json())
}

fn failure(code: i32, message: &str) -> Value {
    json!({"success": false, "error_code": code, "error_message": message})
}

/// Asserts the reply to a refused call: the number and the name of the code, then the message.
#[track_caller]
fn refused((status, reply): (u16, Value), expected: (u16, i32, &str), words: &str) {
    let (expected_status, code, name) = expected;
    assert_eq!((status, &reply["error_code"]), (expected_status, &json!(code)), "{reply}");
    let message = reply["error_message"].as_str().unwrap();
    assert!(message.starts_with(&format!("{name}: ")) && message.contains(words), "{message}");
}

#[test]
fn drain_is_created_queried_and_cancelled() {
    let running = Running::whole();
    let mut client = running.native();
    client.join("127.0.0.1:1", 64 << 20);
    client.put("a", 3);
    // The object could go there, but nobody copies it.
    let mut other = running.native();
    other.join("127.0.0.1:2", 64 << 20);
    let post = |body: &str| ask(&running, "POST", "/api/v1/drain_jobs", body);
    let (status, made) = post(r#"{"segments": ["127.0.0.1:1"], "max_concurrency": 4}"#);
    assert_eq!((status, &made["success"], &made["status"]), (200, &json!(true), &json!("CREATED")));
    assert_eq!((&made["error_code"], &made["error_message"]), (&json!(0), &json!("")));
    let again = post(r#"{"segments": ["127.0.0.1:1"]}"#);
    refused(again, (409, -1010, "UNAVAILABLE_IN_CURRENT_STATUS"), "segment=127.0.0.1:1");
    let id = made["job_id"].as_str().unwrap();
    let query = format!("/api/v1/drain_jobs/query?job_id={id}");
    eventually("it has begun", || {
        ask(&running, "GET", &query, "").1["status_name"] != json!("CREATED")
    });
    let (status, job) = ask(&running, "GET", &query, "");
    assert_eq!(
        (status, &job["job_id"], &job["segments"]),
        (200, &json!(id), &json!(["127.0.0.1:1"]))
    );
    for count in ["succeeded_units", "failed_units", "migrated_bytes", "evicted_objects"] {
        assert_eq!(job[count], 0, "{job}");
    }
    assert!(job["created_at_ms_epoch"].as_u64().unwrap() > 1_600_000_000_000);
    let segment = "/api/v1/segments/status?segment=127.0.0.1:1";
    let draining = ask(&running, "GET", segment, "").1;
    assert_eq!((&draining["status"], &draining["status_name"]), (&json!(2), &json!("DRAINING")));
    let cancel = format!("/api/v1/drain_jobs/cancel?job_id={id}");
    let (status, cancelled) = ask(&running, "POST", &cancel, "");
    assert_eq!((status, &cancelled["status"]), (200, &json!("CANCELED")));
    assert_eq!(ask(&running, "GET", segment, "").1["status_name"], "OK");
    let (status, _) = post(r#"{"segments": ["127.0.0.1:1"], "allow_eviction": true}"#);
    assert_eq!(status, 200);
    let (status, _) = post(r#"{"segments": ["127.0.0.1:1"], "allow_eviction": "perhaps"}"#);
    assert_eq!(status, 400);
}

#[test]
fn invalid_drain_is_refused_like_upstream() {
    let running = Running::whole();
    let post = |body: &str| ask(&running, "POST", "/api/v1/drain_jobs", body);
    refused(post(r#"{"segments": ["x"]}"#), (404, -101, "SEGMENT_NOT_FOUND"), "segment=x");
    let (status, empty) = post(r#"{"segments": []}"#);
    assert_eq!((status, &empty["error_code"]), (400, &json!(-600)));
    let (status, bad) = post("{");
    assert_eq!((status, &bad["error_code"]), (400, &json!(-600)));
    assert!(bad["error_message"].as_str().unwrap().starts_with("Invalid JSON body: "), "{bad}");
    for (method, path) in [("GET", "query"), ("POST", "cancel")] {
        let unknown = ask(&running, method, &format!("/api/v1/drain_jobs/{path}?job_id=1-2"), "");
        refused(unknown, (404, -1402, "JOB_NOT_FOUND"), "job=1-2");
        let bad = ask(&running, method, &format!("/api/v1/drain_jobs/{path}?job_id=x"), "");
        assert_eq!(bad, (400, failure(-600, "Missing or invalid job_id")));
    }
}

#[test]
fn refuses_long_body_in_json_before_reading() {
    let running = Running::whole();
    for target in ["POST /api/v1/drain_jobs", "PUT /api/v1/tenant_quotas?tenant_id=t"] {
        let mut stream = TcpStream::connect(running.admin()).unwrap();
        let head =
            format!("{target} HTTP/1.0\r\nhost: localhost\r\ncontent-length: 3000000\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.0 413 "), "{head}");
        let reply: Value = serde_json::from_str(body).unwrap();
        assert_eq!(reply, failure(-600, "the body is longer than 2097152 bytes"));
    }
}

#[test]
fn quotas_are_listed_set_and_removed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("quotas.yaml");
    std::fs::write(&path, "version: 1\ntenants:\n  - name: a b\n    quota: 1KB\n").unwrap();
    let running = Running::new(MasterConfig {
        is_multi_tenant: true,
        tenant_policy: path.to_str().unwrap().to_owned(),
        ..whole_config()
    });
    let all = "/api/v1/tenant_quotas";
    let shown = |name: &str, bytes: u64| {
        json!({
            "tenant_id": name, "requested_quota_bytes": bytes, "effective_quota_bytes": 0,
            "charged_bytes": 0, "disk_bytes": 0, "admission_closed": true, "over_quota": false,
            "has_explicit_policy": true,
        })
    };
    let expected = json!({"success": true, "data": [shown("a b", 1024)]});
    assert_eq!(ask(&running, "GET", all, ""), (200, expected));
    let put = |target: &str, body: &str| ask(&running, "PUT", target, body);
    let expected = json!({"success": true, "data": shown("c", 7)});
    let target = "/api/v1/tenant_quotas?tenant_id=c";
    assert_eq!(put(target, r#"{"requested_quota_bytes": 7}"#), (200, expected));
    assert!(std::fs::read_to_string(&path).unwrap().contains("\"c\""));
    let metrics = get(running.admin(), "/metrics");
    for line in [
        "mooncake_tenant_quota_requested_bytes{tenant_id=\"a b\"} 1024",
        "mooncake_tenant_quota_effective_bytes{tenant_id=\"c\"} 0",
        "mooncake_tenant_quota_charged_bytes{tenant_id=\"c\"} 0",
        "mooncake_tenant_quota_admission_closed{tenant_id=\"c\"} 1",
        "mooncake_tenant_quota_over_quota{tenant_id=\"c\"} 0",
        "mooncake_tenant_quota_explicit_policy{tenant_id=\"c\"} 1",
        "mooncake_tenant_quota_reject_total{tenant_id=\"c\",reason=\"quota_exceeded\"} 0",
        "mooncake_tenant_evict_bytes_total{tenant_id=\"c\"} 0",
        "mooncake_tenant_quota_allocatable_capacity_bytes 0",
        "mooncake_tenant_quota_requested_bytes_sum 1031",
        "mooncake_tenant_quota_effective_bytes_sum 0",
    ] {
        assert!(metrics.text().lines().any(|found| found == line), "{line}");
    }
    let range = failure(-600, "Tenant quota must be in [1, 2^63 - 1] bytes");
    assert_eq!(put(target, r#"{"requested_quota_bytes": 0}"#), (400, range));
    assert_eq!(put(target, "{}").0, 400);
    assert_eq!(put(all, "{}"), (400, failure(-600, "Missing or invalid tenant_id")));
    let one = "/api/v1/tenant_quotas?tenant_id=a%20b";
    assert_eq!(ask(&running, "GET", one, "").1["data"]["requested_quota_bytes"], 1024);
    let gone = json!({"success": true, "data": null});
    assert_eq!(ask(&running, "DELETE", one, ""), (200, gone));
    for method in ["DELETE", "GET"] {
        refused(ask(&running, method, one, ""), (404, -704, "OBJECT_NOT_FOUND"), "quota");
    }
}

#[test]
fn quotas_tell_bytes_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("quotas.yaml");
    std::fs::write(&path, "version: 1\ntenants:\n  - name: a\n    quota: 1KB\n").unwrap();
    let running = Running::new(MasterConfig {
        is_multi_tenant: true,
        tenant_policy: path.to_str().unwrap().to_owned(),
        has_offload: true,
        adopts_disk_records: true,
        ..whole_config()
    });
    let mut client = running.native();
    client.join("127.0.0.1:1", 64 << 20);
    let record = Record { tenant: "a", key: b"k", version: 1, length: 5000 };
    client.mount_disk_with(&[record]);
    let shown = ask(&running, "GET", "/api/v1/tenant_quotas?tenant_id=a", "").1;
    let data = &shown["data"];
    assert_eq!((&data["disk_bytes"], &data["charged_bytes"]), (&json!(5000), &json!(0)));
}

#[test]
fn no_quotas_without_multi_tenancy() {
    let running = Running::whole();
    let target = "/api/v1/tenant_quotas?tenant_id=a";
    for (method, body) in [("GET", ""), ("PUT", r#"{"requested_quota_bytes": 7}"#)] {
        let reply = ask(&running, method, target, body);
        let why = "quotas need --enable_multi_tenants";
        refused(reply, (409, -1011, "UNAVAILABLE_IN_CURRENT_MODE"), why);
    }
    assert_eq!(get(running.admin(), "/api/v1/drain_jobs").status, 404);
}

#[test]
fn quota_whose_file_cannot_be_written_is_not_in_effect() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("quotas.yaml");
    std::fs::write(&path, "version: 1\ntenants:\n  - name: a\n    quota: 1KB\n").unwrap();
    let running = Running::new(MasterConfig {
        is_multi_tenant: true,
        tenant_policy: path.to_str().unwrap().to_owned(),
        ..whole_config()
    });
    // The file is written beside the present one first.
    std::fs::create_dir(path.with_extension("new")).unwrap();
    let before = ask(&running, "GET", "/api/v1/tenant_quotas", "").1;
    for tenant in ["a", "c"] {
        let target = format!("/api/v1/tenant_quotas?tenant_id={tenant}");
        let (status, reply) = ask(&running, "PUT", &target, r#"{"requested_quota_bytes": 7}"#);
        assert_ne!(status, 200, "{reply}");
        let message = reply["error_message"].as_str().unwrap();
        assert!(message.contains("quotas.yaml"), "{message}");
    }
    assert_eq!(ask(&running, "GET", "/api/v1/tenant_quotas", "").1, before);
    std::fs::remove_dir(path.with_extension("new")).unwrap();
    let put = r#"{"requested_quota_bytes": 7}"#;
    assert_eq!(ask(&running, "PUT", "/api/v1/tenant_quotas?tenant_id=c", put).0, 200);
}

#[test]
fn quota_file_overrides_log_after_restart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("quotas.yaml");
    let begin = |tenants: &str| {
        std::fs::write(&path, format!("version: 1\ntenants:\n{tenants}")).unwrap();
        Running::new(MasterConfig {
            is_multi_tenant: true,
            tenant_policy: path.to_str().unwrap().to_owned(),
            state_dir: StateDir::At(folder.path().join("state")),
            ..whole_config()
        })
    };
    let running = begin("  - name: a\n    quota: 1KB\n  - name: b\n    quota: 2KB\n");
    let put = r#"{"requested_quota_bytes": 7}"#;
    assert_eq!(ask(&running, "PUT", "/api/v1/tenant_quotas?tenant_id=c", put).0, 200);
    running.stop();
    let running = begin("  - name: a\n    quota: 3KB\n  - name: c\n    quota: 7\n");
    let shown = ask(&running, "GET", "/api/v1/tenant_quotas", "").1;
    let shown = shown["data"].as_array().unwrap().iter();
    let shown: Vec<_> = shown
        .map(|quota| (quota["tenant_id"].clone(), quota["requested_quota_bytes"].clone()))
        .collect();
    assert_eq!(shown, [(json!("a"), json!(3072)), (json!("c"), json!(7))]);
}
