//! Deadlines of large batches, which are sent in several messages.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use mooncake_base::{ErrorKind, KeyBatch, ObjectKey, Result};
use mooncake_proto::v1::request::Call;
use mooncake_store_client::{Client, ClientConfig, NewTask, ProbeTerms};
use mooncake_testkit::{Cluster, ClusterSettings, Fault, Gate, cluster::key};

/// Keys of three messages.
const KEYS: usize = 2 * 8192 + 1;

fn errors<T>(results: Vec<Result<T>>) -> Vec<ErrorKind> {
    results.into_iter().filter_map(|result| result.err().map(|error| error.kind())).collect()
}

#[test]
fn messages_of_a_batch_share_one_deadline() {
    let cluster = Cluster::start(ClusterSettings { nodes: 0, ..ClusterSettings::default() })
        .expect("a cluster of one process starts");
    let config = ClientConfig { rpc_timeout: Duration::from_millis(200), ..Default::default() };
    let node = cluster.join_with(config).expect("the node joins");
    let keys: Vec<ObjectKey> = (0..KEYS).map(|number| key(&number.to_string())).collect();
    // The master hangs, so that the first message takes all the time.
    let sent = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&sent);
    node.link.inject(usize::MAX, Fault::Hold(Gate::new()), move |call| {
        let is_heartbeat = matches!(call, Call::Heartbeat(_));
        count.fetch_add(usize::from(!is_heartbeat), Ordering::Relaxed);
        !is_heartbeat
    });
    let remove = |client: &Client| errors(client.remove(&keys, false));
    let presence = |client: &Client| {
        let mut batch = KeyBatch::default();
        keys.iter().for_each(|key| batch.push(key.as_bytes()));
        let presence = client.presence(batch, ProbeTerms::default());
        assert!(presence.found.iter().all(Option::is_none));
        presence.failure.map(|error| vec![error.kind(); KEYS]).unwrap_or_default()
    };
    let new_tasks = |client: &Client| {
        let task = |key: &ObjectKey| NewTask::Copy { key: key.clone(), targets: Vec::new() };
        errors(client.create_tasks(&keys.iter().map(task).collect::<Vec<_>>()))
    };
    type Operation<'a> = &'a dyn Fn(&Client) -> Vec<ErrorKind>;
    let operations: [(&str, Operation<'_>); 6] = [
        ("exists", &|client| errors(client.exists(&keys, ProbeTerms::default()))),
        ("presence", &presence),
        ("locate", &|client| errors(client.locate(&keys))),
        ("remove", &remove),
        ("clear_replicas", &|client| errors(client.clear_replicas(&keys, ""))),
        ("create_tasks", &new_tasks),
    ];
    for (name, operation) in operations {
        sent.store(0, Ordering::Relaxed);
        assert_eq!(operation(&node.client), [ErrorKind::Timeout; KEYS], "{name}");
        assert_eq!(sent.load(Ordering::Relaxed), 1, "{name} sends nothing after its deadline");
    }
}
