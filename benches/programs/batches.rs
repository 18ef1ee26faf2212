//! Measures batches of many small objects end to end: a master and two clients in this process, over
//! the native protocol, as between processes of one host.
//!
//! `cargo run --release -p mooncake-benches --bin batches -- [ITEMS [ROUNDS]]`
//!
//! For results that do not depend on the load of the machine, count instructions: run it twice under
//! `valgrind --tool=callgrind` with different ROUNDS. The difference is the cost of the additional
//! rounds, client and master together.
#![allow(clippy::print_stdout, reason = "the program prints its results")]

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
    let holder = connect(&address, 4 * (items * OBJECT_BYTES) as u64, runtime.handle())?;
    let reader = connect(&address, 0, runtime.handle())?;
    let mut memory = vec![7_u8; items * OBJECT_BYTES];
    let first = memory.as_mut_ptr();
    let range = |at: usize| {
        // SAFETY: the memory outlives both clients, and no reference to it is used meanwhile.
        [unsafe { LocalRange::held(first.wrapping_add(at * OBJECT_BYTES), OBJECT_BYTES) }]
    };
    let ranges: Vec<[LocalRange; 1]> = (0..items).map(range).collect();
    let (mut put, mut get) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let keys = keys(round, items)?;
        let begin = Instant::now();
        put_all(&holder, &keys, &ranges)?;
        put.push(begin.elapsed());
        let begin = Instant::now();
        read_all(&reader, &keys, &ranges)?;
        get.push(begin.elapsed());
        holder.remove(&keys, true).into_iter().collect::<Result<Vec<_>, _>>()?;
    }
    for (what, mut times) in [("put", put), ("get", get)] {
        times.sort_unstable();
        let median = times.get(times.len() / 2).context("no rounds")?;
        println!(
            "{what} {items} items: {:.3} us per item",
            median.as_secs_f64() * 1e6 / items as f64
        );
    }
    drop((holder, reader));
    runtime.block_on(master.stop());
    Ok(())
}

fn connect(address: &str, segment_bytes: u64, runtime: &Handle) -> Result<Client> {
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
        ensure!(
            matches!(outcome?, PutOutcome::Stored { replicas: 1, .. }),
            "the key existed already"
        );
    }
    Ok(())
}

fn read_all(client: &Client, keys: &[ObjectKey], ranges: &[[LocalRange; 1]]) -> Result<()> {
    let located = client.locate(keys).into_iter().collect::<Result<Vec<_>, _>>()?;
    let reads: Vec<_> =
        located.iter().zip(ranges).map(|(located, into)| Read::whole(located, into)).collect();
    for outcome in client.read(&reads) {
        ensure!(outcome? == OBJECT_BYTES as u64, "an object was read in part");
    }
    Ok(())
}
