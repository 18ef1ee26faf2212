//! The admin endpoints in upstream's formats.

use std::collections::BTreeSet;

use bytes::Bytes;
use mooncake_base::Token;
use mooncake_master::{
    MasterConfig,
    config::{Secret, StateDir},
};
use mooncake_proto::v1::{self, request, response};
use serde_json::{Value, json};

use crate::support::{Running, get, http, http_with, whole_config};

/// Starts a master with one client, one segment of 64 MiB and two objects.
fn filled() -> (Running, crate::support::NativeClient<std::net::TcpStream>) {
    let running = Running::whole();
    let mut client = running.native();
    client.join("127.0.0.1:1", 64 << 20);
    client.put("a", 3);
    client.put("b/c", 5);
    (running, client)
}

#[test]
fn reports_health_and_role_of_single_master() {
    let running = Running::whole();
    let health = get(running.admin(), "/health");
    assert!(health.head.contains("content-type: application/json"), "{}", health.head);
    assert_eq!(
        health.json(),
        json!({
            "status": "ok", "role": "leader", "ha_state": "serving", "service_ready": true,
            "leader_address": null, "view_version": null,
            "log": "off", "finalized": true,
            "tasks": {"pending": 0, "processing": 0, "drains": 0},
        })
    );
    assert_eq!(get(running.admin(), "/role").text(), "leader");
    assert_eq!(get(running.admin(), "/ha_status").text(), "serving");
    let leader = json!({"present": false, "leader_address": null, "view_version": null});
    assert_eq!(get(running.admin(), "/leader").json(), leader);
}

#[test]
fn guide_is_served_as_text() {
    let running = Running::whole();
    let guide = get(running.admin(), "/guide");
    assert!(guide.head.contains("content-type: text/plain; charset=utf-8"), "{}", guide.head);
    assert!(guide.text().starts_with("# Running a pool\n"));
    assert!(get(running.admin(), "/").text().contains("href=\"/guide\""));
}

#[test]
fn unknown_path_is_plain_404() {
    let running = Running::whole();
    for (method, target) in [("GET", "/nothing"), ("GET", "/api/v1/remove_all"), ("PUT", "/health")]
    {
        let answer = http(running.admin(), method, target, b"");
        assert_eq!((answer.status, answer.text()), (404, "404 Not Found"), "{method} {target}");
    }
}

#[test]
fn metrics_use_upstream_names() {
    let (running, _client) = filled();
    let answer = get(running.admin(), "/metrics");
    assert!(answer.head.contains("content-type: text/plain; version=0.0.4"), "{}", answer.head);
    let has = |line: &str| assert!(answer.text().lines().any(|l| l == line), "{line}");
    has("master_key_count 2");
    has("master_active_clients 1");
    has("master_total_capacity_bytes 67108864");
    has("segment_total_capacity_bytes{segment=\"127.0.0.1:1\"} 67108864");
    has("master_put_start_requests_total 2");
    has("master_put_start_failures_total 0");
    has("master_mount_segment_requests_total 1");
    has("master_value_size_bytes_bucket{le=\"4096\"} 2");
    has("master_value_size_bytes_sum 8");
    has("total_get_nums_ 0");
    assert!(answer.text().contains("master_batch_exist_key_items_total"));
}

#[test]
fn summary_is_one_line() {
    let (running, _client) = filled();
    let answer = get(running.admin(), "/metrics/summary");
    let text = answer.text();
    assert!(text.starts_with("role=leader, state=serving, service_ready=true, master={"), "{text}");
    assert!(text.contains("Keys: 2 (soft-pinned: 0) | Clients: 1 |"), "{text}");
    assert_eq!(text.lines().count(), 1);
}

#[test]
fn lists_keys_and_segments_one_per_line() {
    let (running, _client) = filled();
    let text = get(running.admin(), "/get_all_keys");
    let mut keys: Vec<&str> = text.text().lines().collect();
    keys.sort_unstable();
    assert_eq!(keys, ["a", "b/c"]);
    assert_eq!(get(running.admin(), "/get_all_segments").text(), "127.0.0.1:1\n");
}

#[test]
fn shows_segment_details() {
    let (running, client) = filled();
    let detail = get(running.admin(), "/get_segments_detail").json();
    assert_eq!(detail["total_segments"], 1);
    let segment = &detail["segments"][0];
    assert_eq!(segment["segment_name"], "127.0.0.1:1");
    assert_eq!(segment["client_id"], client.id.to_string());
    assert_eq!(segment["base_address"], "0x10000");
    assert_eq!(segment["size_bytes"], 64 << 20);
    assert_eq!(segment["size_human"], "0.0625 GiB");
    assert_eq!(segment["te_endpoint"], "127.0.0.1:1");
    assert_eq!((&segment["protocol"], &segment["status"]), (&json!("tcp"), &json!("OK")));
    let used = segment["allocator_used_bytes"].as_u64().unwrap();
    assert!(used >= 8, "{segment}");
    let text = get(running.admin(), "/query_segment?segment=127.0.0.1:1");
    let expected = format!("127.0.0.1:1\nUsed(bytes): {used}\nCapacity(bytes) : 67108864\n");
    assert_eq!(text.text(), expected);
    let unknown = get(running.admin(), "/query_segment?segment=x");
    assert_eq!((unknown.status, unknown.text()), (500, "Failed to query segment"));
}

#[test]
fn segment_status_is_number_and_name() {
    let (running, _client) = filled();
    let status = |target: &str| {
        let answer = get(running.admin(), &format!("/api/v1/segments/status{target}"));
        (answer.status, answer.json())
    };
    let expected = json!({
        "success": true, "segment": "127.0.0.1:1", "status": 1, "status_name": "OK",
        "error_code": 0, "error_message": "",
    });
    assert_eq!(status("?segment=127.0.0.1%3A1"), (200, expected));
    let unknown =
        json!({"success": false, "error_code": -101, "error_message": "SEGMENT_NOT_FOUND"});
    assert_eq!(status("?segment=x"), (404, unknown));
    let missing = json!({
        "success": false, "error_code": -600, "error_message": "Missing segment query parameter",
    });
    assert_eq!(status(""), (400, missing));
}

#[test]
fn query_key_shows_replicas() {
    let (running, _client) = filled();
    let answer = get(running.admin(), "/query_key?key=b/c").json();
    assert_eq!(answer["success"], true);
    let copy = &answer["data"][0];
    assert_eq!((&copy["size_"], &copy["protocol_"]), (&json!(5), &json!("tcp")));
    assert_eq!(copy["transport_endpoint_"], "127.0.0.1:1");
    assert!(copy["buffer_address_"].as_u64().unwrap() >= 0x10000);
    let decoded = get(running.admin(), "/query_key?key=b%2Fc").json();
    assert_eq!(decoded, answer, "an unknown key is looked up in decoded form");
    let missing = get(running.admin(), "/query_key?key=b%252Fc");
    let expected =
        json!({"success": false, "error_code": -704, "error_message": "OBJECT_NOT_FOUND"});
    assert_eq!((missing.status, missing.json()), (404, expected), "it is decoded once only");
}

#[test]
fn batch_query_shows_each_key() {
    let (running, _client) = filled();
    let answer = get(running.admin(), "/batch_query_keys?keys=b%2Fc,x").json();
    let (known, unknown) = (&answer["data"]["b/c"], &answer["data"]["x"]);
    assert_eq!((&known["ok"], &known["error"]), (&json!(true), &Value::Null));
    assert_eq!(known["values"][0]["size_"], 5);
    assert_eq!((&unknown["ok"], &unknown["error"]), (&json!(false), &json!("OBJECT_NOT_FOUND")));
    let none = get(running.admin(), "/batch_query_keys");
    assert_eq!(none.status, 400);
    assert_eq!(none.json()["error"], "No keys provided. Use ?keys=key1,key2,...");
}

#[test]
fn only_reads_count_as_hits_and_misses() {
    let (running, _client) = filled();
    for target in ["/query_key?key=a", "/query_key?key=none", "/batch_query_keys?keys=a,none"] {
        get(running.admin(), target);
    }
    let metrics = get(running.admin(), "/metrics");
    for line in ["total_get_nums_ 2", "valid_get_nums_ 1", "mem_cache_hit_bytes_total 3"] {
        assert!(metrics.text().lines().any(|l| l == line), "{line}");
    }
}

#[test]
fn head_request_is_answered_without_body() {
    let running = Running::whole();
    let answer = http(running.admin(), "HEAD", "/health", b"");
    assert_eq!((answer.status, &answer.body[..]), (200, &b""[..]));
    let length = get(running.admin(), "/health").body.len();
    assert!(answer.head.contains(&format!("content-length: {length}")), "{}", answer.head);
}

#[test]
fn binary_key_is_listed_and_found() {
    let running = Running::whole();
    let mut client = running.native();
    client.join("127.0.0.1:1", 1 << 20);
    client.put("sp ace+%41&=\u{fc}", 1);
    assert_eq!(get(running.admin(), "/get_all_keys").text(), "sp ace+%41&=\u{fc}\n");
    let target = "/query_key?key=sp%20ace%2B%2541%26%3D%C3%BC";
    assert_eq!(get(running.admin(), target).status, 200);
    let target = "/batch_query_keys?keys=sp+ace%2B%2541%26%3D%c3%bc,,x";
    let data = get(running.admin(), target).json()["data"].clone();
    assert_eq!(data["sp ace+%41&=\u{fc}"]["ok"], true);
    assert_eq!((&data[""]["ok"], data.as_object().unwrap().len()), (&json!(false), 3));
}

#[test]
fn remote_writes_need_token() {
    let admin_token = Secret::new("s3cret");
    let running = Running::new(MasterConfig { admin_token, ..whole_config() });
    let remove = |headers: &str| {
        http_with(running.admin(), "POST", "/api/v1/remove_all", headers, b"").status
    };
    assert_eq!(remove("host: localhost\r\n"), 200);
    assert_eq!(remove("host: localhost\r\norigin: https://elsewhere.example\r\n"), 403);
    assert_eq!(remove("host: localhost\r\nx-forwarded-for: 192.0.2.1\r\n"), 403);
    assert_eq!(remove("host: elsewhere.example\r\n"), 403);
    assert_eq!(remove("host: elsewhere.example\r\nauthorization: Bearer s3cret\r\n"), 200);
    let wrong = "host: localhost\r\nauthorization: Bearer wrong\r\n";
    let refused = http_with(running.admin(), "POST", "/api/v1/remove_all", wrong, b"");
    assert_eq!((refused.status, &refused.json()["success"]), (403, &json!(false)));
}

#[test]
fn pools_with_a_token_show_no_keys_without_it() {
    let token = Token::new("open sesame").unwrap();
    let running = Running::new(MasterConfig { rpc_token: Some(token), ..whole_config() });
    let ask = |method: &str, target: &str, headers: &str| {
        http_with(running.admin(), method, target, headers, b"").status
    };
    let shown = "authorization: Bearer open sesame\r\n";
    for target in [
        "/get_all_keys",
        "/query_key?key=k",
        "/batch_query_keys?keys=k",
        "/api/v1/object?key=k",
        "/api/v1/keys",
        "/api/v1/key_groups",
    ] {
        assert_eq!(ask("GET", target, ""), 403, "{target}");
        assert_eq!(ask("GET", target, "authorization: Bearer open sesam\r\n"), 403, "{target}");
        assert_ne!(ask("GET", target, shown), 403, "{target}");
    }
    for target in ["/health", "/metrics", "/get_all_segments", "/api/v1/overview", "/"] {
        assert_eq!(ask("GET", target, ""), 200, "{target}");
    }
    let overview = get(running.admin(), "/api/v1/overview").json();
    assert_eq!(overview["shows_keys"], json!(false));
    assert_eq!(ask("POST", "/api/v1/remove_all", "host: localhost\r\n"), 403);
    assert_eq!(ask("POST", "/api/v1/remove_all", shown), 200);
}

#[test]
fn remove_all_keeps_leased_objects_unless_forced() {
    let (running, _client) = filled();
    get(running.admin(), "/query_key?key=a");
    let remove = |target: &str| http(running.admin(), "POST", target, b"").json();
    assert_eq!(remove("/api/v1/remove_all"), json!({"success": true, "removed_count": 1}));
    assert_eq!(get(running.admin(), "/get_all_keys").text(), "a\n");
    let forced = remove("/api/v1/remove_all?force=true");
    assert_eq!(forced, json!({"success": true, "removed_count": 1}));
    assert_eq!(get(running.admin(), "/get_all_keys").text(), "");
}

#[test]
fn page_forbids_external_resources() {
    let running = Running::whole();
    let page = get(running.admin(), "/");
    assert!(page.head.contains("text/html; charset=utf-8"), "{}", page.head);
    assert!(page.head.contains("content-security-policy: default-src 'none'"), "{}", page.head);
    assert!(page.text().starts_with("<!doctype html>"));
}

#[test]
fn overview_shows_pool_clients_and_calls() {
    let (running, client) = filled();
    let shown = get(running.admin(), "/api/v1/overview").json();
    assert_eq!((&shown["pool"]["keys"], &shown["pool"]["clients"]), (&json!(2), &json!(1)));
    assert_eq!(shown["segments"][0]["name"], "127.0.0.1:1");
    assert_eq!(shown["segments"][0]["size"], 64 << 20);
    assert_eq!(shown["clients"][0]["id"], client.id.to_string());
    assert_eq!(shown["segments"][0]["client"], shown["clients"][0]["id"]);
    assert_eq!(shown["addresses"]["rpc"], running.addresses().rpc.to_string());
    let calls = shown["calls"].as_array().unwrap();
    let puts = calls.iter().find(|call| call["name"] == "put_start").unwrap();
    assert_eq!((&puts["calls"], &puts["failed"]), (&json!(2), &json!(0)));
    let names = |rows: &Value| -> BTreeSet<String> {
        rows.as_array().unwrap().iter().map(|row| row["name"].to_string()).collect()
    };
    assert_eq!(names(&shown["calls"]), names(&shown["call_times"]["kinds"]), "one name a call");
    assert!(!shown["history"]["at_ms"].as_array().unwrap().is_empty(), "{shown}");
    let later = format!("/api/v1/overview?since={}", u64::MAX);
    assert_eq!(get(running.admin(), &later).json()["history"]["at_ms"], json!([]));
}

#[test]
fn slow_calls_show_their_key() {
    let slow_call = std::time::Duration::from_micros(1);
    let running = Running::new(MasterConfig { slow_call, ..whole_config() });
    let mut client = running.native();
    client.join("127.0.0.1:1", 1 << 20);
    crate::support::eventually("a probe takes a microsecond", || {
        client.probe(&["a \"key\""]);
        let slow = get(running.admin(), "/api/v1/overview").json()["slow"].clone();
        let latest = slow["latest"].as_array().unwrap();
        slow["threshold_ms"] == 0
            && latest.iter().any(|call| {
                call["call"] == "probe"
                    && call["key"] == r#"a \"key\""#
                    && call["client"] == client.id.to_string()
            })
    });
}

#[test]
fn browses_keys_by_prefix_and_search() {
    let running = Running::whole();
    let mut client = running.native();
    client.join("127.0.0.1:1", 1 << 20);
    for key in ["m/a/1", "m/a/2", "m/b/1", "n/a/1", "m/.*"] {
        client.put(key, 7);
    }
    let find = |query: &str| get(running.admin(), &format!("/api/v1/keys?{query}")).json();
    let names = |page: &Value| -> Vec<String> {
        let keys = page["keys"].as_array().unwrap().iter();
        keys.map(|key| key["key"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&find("prefix=m%2Fa")), ["m/a/1", "m/a/2"]);
    assert_eq!(names(&find("search=a%2F1")), ["m/a/1", "n/a/1"]);
    assert_eq!(names(&find("prefix=m/&search=.*")), ["m/.*"], "a search is no pattern");
    assert_eq!(names(&find("prefix=x")), Vec::<String>::new());
    let first = find("limit=2");
    assert_eq!((names(&first).len(), &first["is_last"]), (2, &json!(false)));
    let next = first["next"].as_str().unwrap();
    let rest = find(&format!("limit=9&after={next}"));
    assert_eq!((names(&rest).len(), &rest["is_last"]), (3, &json!(true)));
    let groups = get(running.admin(), "/api/v1/key_groups?prefix=m/").json()["groups"].clone();
    assert_eq!(groups[0], json!({"group": "a/", "keys": 2, "bytes": 14, "is_key": false}));
}

#[test]
fn shows_log_tasks_and_drains() {
    let folder = tempfile::tempdir().unwrap();
    let state_dir = StateDir::At(folder.path().to_owned());
    let running = Running::new(MasterConfig { state_dir, ..whole_config() });
    let mut client = running.native();
    client.join("127.0.0.1:1", 1 << 20);
    client.put("k\"ey", 3);
    let mut other = running.native();
    other.join("127.0.0.1:2", 1 << 20);
    let task = v1::NewTask {
        kind: v1::TaskKind::Copy.into(),
        key: Bytes::from_static(b"k\"ey"),
        source: String::new(),
        targets: vec!["127.0.0.1:2".to_owned()],
    };
    let call = v1::CreateTasksRequest { caller: client.caller(), tasks: vec![task] };
    let response::Call::CreateTasks(made) = client.call(request::Call::CreateTasks(call)) else {
        panic!("no task was made")
    };
    assert_eq!(made.results[0].failure, None);
    let drain = br#"{"segments": ["127.0.0.1:1"]}"#;
    assert_eq!(http(running.admin(), "POST", "/api/v1/drain_jobs", drain).status, 200);
    let health = get(running.admin(), "/health").json();
    assert_eq!((&health["log"], &health["tasks"]["drains"]), (&json!("healthy"), &json!(1)));
    assert!(health["tasks"]["pending"].as_u64().unwrap() >= 1, "{health}");
    let shown = get(running.admin(), "/api/v1/overview").json();
    let log = &shown["journal"];
    assert_eq!((&log["state"], &log["failure"]), (&json!("healthy"), &json!("")));
    assert!(log["records"].as_u64().unwrap() >= 5, "{log}");
    assert!(log["since_snapshot_bytes"].as_u64().unwrap() > 0, "{log}");
    let rows = shown["tasks"]["rows"].as_array().unwrap();
    assert!(rows.iter().any(|row| row["name"] == "drain 127.0.0.1:1"), "{rows:?}");
    assert!(rows.iter().any(|row| row["name"].as_str().unwrap().starts_with("copy ")), "{rows:?}");
    let metrics = get(running.admin(), "/metrics");
    let has = |line: &str| assert!(metrics.text().lines().any(|l| l.starts_with(line)), "{line}");
    has("mooncake_master_log_healthy 1");
    has("mooncake_master_log_snapshot_age_seconds -1");
    has("mooncake_master_tasks{state=\"processing\"} 0");
    has("mooncake_master_drain_jobs 1");
    has("mooncake_master_drain_moved_bytes{job=");
    for name in ["log_sync_seconds_total", "log_recovery_seconds", "log_records_total"] {
        has(&format!("mooncake_master_{name} "));
    }
}
