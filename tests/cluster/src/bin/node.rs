//! A node that does what its stdin says, a line an order, and answers each with a line: for tests
//! that need a process to kill.
#![allow(clippy::print_stdout, reason = "its stdout is how it answers")]

use std::{
    io::BufRead,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use mooncake_base::ObjectKey;
use mooncake_store_client::{
    Client, ClientConfig, LeanLink, LinkConfig, MetricsSnapshot, PutOptions, PutOutcome, Selector,
};
use mooncake_testkit::Random;
use mooncake_transfer_engine::{Engine, EngineConfig};

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let master = arguments.next().context("the first argument is the master's address")?;
    let mut engine = EngineConfig { name: "127.0.0.1".to_owned(), ..EngineConfig::default() };
    let mut config = ClientConfig {
        segment_bytes: 64 << 20,
        rpc_timeout: Duration::from_secs(5),
        transfer_timeout: Duration::from_secs(5),
        ..ClientConfig::default()
    };
    for flag in arguments {
        match flag.as_str() {
            "--tcp" => engine.is_tcp_forced = true,
            "--lend-nothing" => config.segment_bytes = 0,
            _ => bail!("unknown flag {flag}"),
        }
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let engine = Engine::start(engine, runtime.handle().clone())?;
    let link = LeanLink::new(&master, LinkConfig::default())?;
    let client = Client::connect(config, engine, Arc::new(link))?;
    println!("ready");
    for order in std::io::stdin().lock().lines() {
        let order = order?;
        let words: Vec<&str> = order.split_whitespace().collect();
        if words == ["quit"] {
            break;
        }
        match follow(&client, &words) {
            Ok(answer) => println!("{answer}"),
            Err(error) => println!("error {error:#}"),
        }
    }
    client.close();
    Ok(())
}

fn follow(client: &Client, words: &[&str]) -> Result<String> {
    match *words {
        // Bytes made from a seed, so that another process can tell whether they are the same.
        ["put", key, length, seed] => put(client, key, length, seed, &PutOptions::default()),
        ["put", key, length, seed, copies] => {
            let options = PutOptions { replicas: copies.parse()?, ..PutOptions::default() };
            put(client, key, length, seed, &options)
        }
        ["get", key, length, seed] => {
            let expected = Random::from_seed(seed.parse()?).bytes(length.parse()?);
            let value = client.get_bytes(&self::key(key)?)?;
            Ok(match value {
                None => "missing".to_owned(),
                Some(value) if value == expected => "same".to_owned(),
                Some(value) => format!("different {} bytes", value.len()),
            })
        }
        ["segments"] => Ok(client.segments()?.len().to_string()),
        ["count"] => Ok(client.list(&Selector::All, None, 0)?.objects.len().to_string()),
        ["served"] => Ok(served(&client.metrics())),
        ["close"] => {
            let start = Instant::now();
            client.close();
            Ok(start.elapsed().as_millis().to_string())
        }
        _ => bail!("unknown order {words:?}"),
    }
}

fn put(
    client: &Client,
    key: &str,
    length: &str,
    seed: &str,
    options: &PutOptions,
) -> Result<String> {
    let value = Random::from_seed(seed.parse()?).bytes(length.parse()?);
    Ok(match client.put_bytes(&self::key(key)?, &value, options)? {
        PutOutcome::Stored { replicas } => format!("stored {replicas}"),
        PutOutcome::Existed => "existed".to_owned(),
    })
}

/// Over which transports bytes went.
fn served(metrics: &MetricsSnapshot) -> String {
    metrics.by_transport.keys().copied().collect::<Vec<_>>().join(" ")
}

fn key(text: &str) -> Result<ObjectKey> {
    Ok(ObjectKey::new(text.as_bytes())?)
}
