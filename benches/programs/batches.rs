//! What a batch of many small objects costs, end to end: a master and two clients in this process,
//! over the native protocol, as two processes of one host would be.
//!
//! `cargo run --release -p mooncake-benches --bin batches -- [ITEMS [ROUNDS]]`
//!
//! Instructions do not care how busy a machine is: `valgrind --tool=callgrind` over two runs with
//! different rounds, and the difference is what the rounds between cost, client and master together.
#![allow(clippy::print_stdout, reason = "a program that prints, for its author")]

use std::{sync::Arc, time::Instant};

use anyhow::{Context as _, Result, ensure};
use mooncake_base::ObjectKey;
use mooncake_master::MasterConfig;
use mooncake_store_client::{
    Client, ClientConfig, LinkConfig, PutItem, PutOptions, PutOutcome, Read, SocketLink,
};
use mooncake_transfer_engine::{Engine, EngineConfig, LocalRange};
use tokio::runtime::{Builder, Handle};

/// The length of an object.
const OBJECT_BYTES: usize = 1 << 10;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, or: usize| arguments.get(at).map_or(Ok(or), |word| word.parse());
    let (items, rounds) = (number(0, 3000)?, number(1, 10)?);
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let master = runtime.block_on(mooncake_master::start(MasterConfig::embedded()))?;
    let address = master.addresses().rpc.to_string();
    let lender = join(&address, 4 * (items * OBJECT_BYTES) as u64, runtime.handle())?;
    let reader = join(&address, 0, runtime.handle())?;
    let mut memory = vec![7_u8; items * OBJECT_BYTES];
    let first = memory.as_mut_ptr();
    let range = |at: usize| {
        // SAFETY: the memory outlives both clients, and nobody looks at it in between.
        [unsafe { LocalRange::held(first.wrapping_add(at * OBJECT_BYTES), OBJECT_BYTES) }]
    };
    let ranges: Vec<[LocalRange; 1]> = (0..items).map(range).collect();
    let (mut put, mut got) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let keys = keys(round, items)?;
        let begin = Instant::now();
        put_all(&lender, &keys, &ranges)?;
        put.push(begin.elapsed());
        let begin = Instant::now();
        read_all(&reader, &keys, &ranges)?;
        got.push(begin.elapsed());
        lender.remove(&keys, true).into_iter().collect::<Result<Vec<_>, _>>()?;
    }
    for (what, mut times) in [("put", put), ("get", got)] {
        times.sort_unstable();
        let median = times.get(times.len() / 2).context("no rounds")?;
        println!("{what} {items} items: {:.3} us each", median.as_secs_f64() * 1e6 / items as f64);
    }
    drop((lender, reader));
    runtime.block_on(master.stop());
    Ok(())
}

fn join(address: &str, segment_bytes: u64, runtime: &Handle) -> Result<Client> {
    let engine = EngineConfig { name: "127.0.0.1".to_owned(), ..EngineConfig::default() };
    let engine = Engine::start(engine, runtime.clone())?;
    let link = SocketLink::new(address, LinkConfig::default())?;
    let config = ClientConfig { segment_bytes, ..ClientConfig::default() };
    Ok(Client::connect(config, engine, Arc::new(link))?)
}

fn keys(round: usize, items: usize) -> Result<Vec<ObjectKey>> {
    let name = |at| format!("batch-of-small-objects/{round:06}/{at:08}").into_bytes();
    Ok((0..items).map(|at| ObjectKey::new(name(at))).collect::<Result<_, _>>()?)
}

fn put_all(client: &Client, keys: &[ObjectKey], ranges: &[[LocalRange; 1]]) -> Result<()> {
    let items: Vec<_> = keys
        .iter()
        .zip(ranges)
        .map(|(key, parts)| PutItem { key: key.into(), parts: parts.as_slice() })
        .collect();
    for outcome in client.put(&items, &PutOptions::default()) {
        ensure!(matches!(outcome?, PutOutcome::Stored { replicas: 1 }), "a key is new");
    }
    Ok(())
}

fn read_all(client: &Client, keys: &[ObjectKey], ranges: &[[LocalRange; 1]]) -> Result<()> {
    let located = client.locate(keys).into_iter().collect::<Result<Vec<_>, _>>()?;
    let reads: Vec<_> =
        located.iter().zip(ranges).map(|(located, into)| Read::whole(located, into)).collect();
    for outcome in client.read(&reads) {
        ensure!(outcome? == OBJECT_BYTES as u64, "an object comes whole");
    }
    Ok(())
}
