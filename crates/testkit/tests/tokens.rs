//! Clients and a master that share a token, and clients and masters that do not.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use mooncake_base::{ErrorCode, Result, Token};
use mooncake_master::MasterConfig;
use mooncake_store_client::{ClientConfig, LinkConfig, PutOptions, PutOutcome, SocketLink};
use mooncake_testkit::{Cluster, ClusterSettings, Node, cluster::key};

fn token(secret: &str) -> Token {
    Token::new(secret).expect("long enough")
}

fn cluster(rpc_token: Option<Token>) -> Cluster {
    let master = MasterConfig { rpc_token, ..MasterConfig::embedded() };
    let settings = ClusterSettings { master, ..ClusterSettings::default() };
    Cluster::start(settings).expect("a cluster of one process starts")
}

fn join(cluster: &Cluster, token: Option<Token>, may_use_unix_socket: bool) -> Result<Node> {
    let config = LinkConfig { token, may_use_unix_socket, ..LinkConfig::default() };
    let link = SocketLink::new(&cluster.address().to_string(), config)?;
    cluster.join_by(ClientConfig::default(), Arc::new(link))
}

#[test]
fn clients_that_know_the_token_put_and_get() {
    let cluster = cluster(Some(token("open sesame")));
    for (number, may_use_unix_socket) in [true, false].into_iter().enumerate() {
        let node = join(&cluster, Some(token("open sesame")), may_use_unix_socket).unwrap();
        let key = key(&format!("key-{number}"));
        let put = node.client.put_bytes(&key, b"value", &PutOptions::default()).unwrap();
        assert!(matches!(put, PutOutcome::Stored { replicas: 1, .. }));
        assert_eq!(cluster.nodes[0].client.get_bytes(&key).unwrap().unwrap(), b"value");
    }
}

#[test]
fn sides_that_share_no_token_refuse_each_other_at_once() {
    let guarded = cluster(Some(token("open sesame")));
    let open = cluster(None);
    for (cluster, secret, what) in [
        (&guarded, None, "no token"),
        (&guarded, Some("open sesamE"), "another token"),
        (&open, Some("open sesame"), "a master without a token"),
    ] {
        let begin = Instant::now();
        let error = join(cluster, secret.map(token), true).expect_err(what);
        assert_eq!(error.code(), ErrorCode::ILLEGAL_CLIENT, "{what}: {error}");
        let told = format!("{error} {}", error.remedy());
        assert!(told.contains("MOONCAKE_MASTER_TOKEN"), "{what}: {told}");
        assert!(begin.elapsed() < Duration::from_secs(3), "{what}: {:?}", begin.elapsed());
    }
    assert!(join(&open, None, true).is_ok());
}
