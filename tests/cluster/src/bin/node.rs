//! A client and its engine in a process that tests can kill. It takes commands on stdin, one a line,
//! and replies to each with one line on stdout.
#![allow(clippy::print_stdout, reason = "replies go to stdout")]

use std::{
    io::BufRead,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use mooncake_base::{JobId, ObjectKey, TaskId};
use mooncake_cluster_tests::{load::Loads, pattern};
use mooncake_store_client::{
    Client, ClientConfig, LinkConfig, MetricsSnapshot, NewDrain, NewTask, ObjectStatus, ProbeTerms,
    PutOptions, PutOutcome, Read, Reservation, Selector, SocketLink, Write,
};
use mooncake_testkit::{Random, cluster::range};
use mooncake_transfer_engine::{Engine, EngineConfig, SharedMemory};

/// The state of a node.
struct Node {
    client: Arc<Client>,
    loads: Loads,
    /// Puts that were started and are neither ended nor revoked, and the memory of their values.
    started: Vec<(SharedMemory, Reservation)>,
}

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
            "--no-segment" => config.segment_bytes = 0,
            "--small-segment" => config.segment_bytes = 16 << 20,
            "--checksums" => config.has_checksums = true,
            _ => bail!("unknown flag {flag}"),
        }
    }
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let engine = Engine::start(engine, runtime.handle().clone())?;
    let link = SocketLink::new(&master, LinkConfig::default())?;
    let client = Client::connect(config, engine, Arc::new(link))?;
    let mut node = Node { client: Arc::new(client), loads: Loads::default(), started: Vec::new() };
    println!("ready");
    for command in std::io::stdin().lock().lines() {
        let command = command?;
        let words: Vec<&str> = command.split_whitespace().collect();
        if words == ["quit"] {
            break;
        }
        match run_command(&mut node, &words) {
            Ok(reply) => println!("{reply}"),
            Err(error) => println!("error {error:#}"),
        }
    }
    node.client.close();
    Ok(())
}

fn run_command(node: &mut Node, words: &[&str]) -> Result<String> {
    match *words {
        ["read-loop", name, keys] => {
            node.loads.read(&node.client, name, keys.parse()?)?;
            Ok("started".to_owned())
        }
        ["write-loop", name, keys, length, ref segment @ ..] => {
            let options = pinned_on(segment);
            let (keys, length) = (keys.parse()?, length.parse()?);
            node.loads.write(&node.client, name, keys, length, options)?;
            Ok("started".to_owned())
        }
        // As `write-loop`, but values can be evicted and have several copies.
        ["churn-loop", name, keys, length, copies] => {
            let options = PutOptions { replicas: copies.parse()?, ..PutOptions::default() };
            let (keys, length) = (keys.parse()?, length.parse()?);
            node.loads.write(&node.client, name, keys, length, options)?;
            Ok("started".to_owned())
        }
        ["tally"] => Ok(node.loads.tally().to_string()),
        ["stop"] => Ok(node.loads.stop()?.to_string()),
        ["start-put", key, length, version] => {
            node.started.push(start_put(&node.client, key, length.parse()?, version.parse()?)?);
            Ok("started".to_owned())
        }
        _ => run_client_command(&node.client, words),
    }
}

fn run_client_command(client: &Client, words: &[&str]) -> Result<String> {
    match *words {
        // Stores a self-describing value: see `pattern`.
        ["fill", key, length, version, ref segment @ ..] => {
            let value = pattern::value(key, version.parse()?, length.parse()?);
            put_value(client, key, &value, &pinned_on(segment))
        }
        ["fill-twice", key, length, version] => {
            let value = pattern::value(key, version.parse()?, length.parse()?);
            let options = PutOptions { replicas: 2, ..pinned_on(&[]) };
            put_value(client, key, &value, &options)
        }
        ["version", key] => match client.get_bytes(&self::key(key)?)? {
            None => Ok("missing".to_owned()),
            Some(value) => match pattern::version_of(key, &value) {
                Ok(version) => Ok(version.to_string()),
                Err(what) => Ok(format!("wrong {what}")),
            },
        },
        ["status", key] => match client.exists(&[self::key(key)?], ProbeTerms::default()).pop() {
            Some(status) => Ok(match status? {
                None => "missing".to_owned(),
                Some(ObjectStatus::Writing) => "writing".to_owned(),
                Some(ObjectStatus::Complete { .. }) => "complete".to_owned(),
            }),
            None => bail!("a batch of one gave no outcome"),
        },
        ["remove", key] => match client.remove(&[self::key(key)?], true).pop() {
            Some(removed) => removed.map(|()| "removed".to_owned()).map_err(Into::into),
            None => bail!("a batch of one gave no outcome"),
        },
        ["name"] => Ok(client.name().to_owned()),
        ["copy" | "move" | "task" | "drain" | "drained" | "copies", ..] => {
            run_task_command(client, words)
        }
        // Stores bytes generated from a seed, so that another process can compare them.
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
        // Bytes read from a peer, errors of a peer, and copies skipped because of errors.
        ["bytes-from", peer] => Ok(bytes_from(client, peer).to_string()),
        ["errors", peer] => {
            Ok(client.metrics().peer_errors.get(peer).copied().unwrap_or(0).to_string())
        }
        ["skipped"] => Ok(client.metrics().skipped_copies.to_string()),
        ["transports"] => Ok(used_transports(&client.metrics())),
        ["close"] => {
            let start = Instant::now();
            client.close();
            Ok(start.elapsed().as_millis().to_string())
        }
        _ => bail!("unknown command {words:?}"),
    }
}

/// Runs the commands about copies, moves and drains.
fn run_task_command(client: &Client, words: &[&str]) -> Result<String> {
    let create = |task: NewTask| -> Result<String> {
        Ok(client.create_tasks(&[task]).pop().context("one outcome")??.to_string())
    };
    match *words {
        ["copy", key, target] => {
            create(NewTask::Copy { key: self::key(key)?, targets: vec![target.to_owned()] })
        }
        ["move", key, source, target] => create(NewTask::Move {
            key: self::key(key)?,
            source: source.to_owned(),
            target: target.to_owned(),
        }),
        ["task", id] => {
            let id = TaskId::parse(id).context("invalid task id")?;
            let info = client.tasks(&[id]).pop().context("one outcome")??;
            Ok(format!("{:?} {}", info.status, info.message))
        }
        ["drain", segment] => {
            let segments = vec![segment.to_owned()];
            let new = NewDrain { segments, concurrency: 2, ..NewDrain::default() };
            Ok(client.drain(&new)?.id.to_string())
        }
        ["drained", id] => {
            let info = client.drain_info(JobId::parse(id).context("invalid job id")?)?;
            Ok(format!("{:?} {} {}", info.status, info.succeeded, info.moved_bytes))
        }
        ["copies", key] => {
            let located = client.locate(&[self::key(key)?]).pop().context("one outcome")??;
            Ok(located.places().len().to_string())
        }
        _ => bail!("unknown command {words:?}"),
    }
}

fn put(
    client: &Client,
    key: &str,
    length: &str,
    seed: &str,
    options: &PutOptions,
) -> Result<String> {
    put_value(client, key, &Random::from_seed(seed.parse()?).bytes(length.parse()?), options)
}

fn put_value(client: &Client, key: &str, value: &[u8], options: &PutOptions) -> Result<String> {
    Ok(match client.put_bytes(&self::key(key)?, value, options)? {
        PutOutcome::Stored { replicas, .. } => format!("stored {replicas}"),
        PutOutcome::Existed => "existed".to_owned(),
    })
}

/// Starts a put and writes the first half of the value.
fn start_put(
    client: &Client,
    key: &str,
    length: usize,
    version: u64,
) -> Result<(SharedMemory, Reservation)> {
    // The value is read from another object, since writes need memory of the engine.
    let source = format!("{key}-source");
    put_value(client, &source, &pattern::value(key, version, length), &PutOptions::default())?;
    let source = client.locate(&[self::key(&source)?]).pop().context("one outcome")??;
    let memory = client.engine().allocate(length as u64)?;
    let half = range(&memory, 0, length / 2);
    client
        .read(&[Read::range(&source, 0, length as u64 / 2, &[half])])
        .pop()
        .context("one outcome")??;
    let item = (self::key(key)?, length as u64);
    let reserved = client.reserve(&[item], &PutOptions::default()).pop();
    let mut reservation = reserved.context("one outcome")??.context("the key is free")?;
    let mut writes = [Write { reservation: &mut reservation, ranges: vec![(0, half)] }];
    client.write(&mut writes).pop().context("one outcome")??;
    Ok((memory, reservation))
}

/// Returns options that pin the object, so that only the death of its holder removes it, and prefer
/// a segment if one is given.
fn pinned_on(segment: &[&str]) -> PutOptions {
    let preferred_segments = segment.iter().map(|&name| name.to_owned()).collect();
    PutOptions { preferred_segments, is_hard_pinned: true, ..PutOptions::default() }
}

/// Returns the number of bytes read from a peer.
fn bytes_from(client: &Client, peer: &str) -> u64 {
    let peers = client.engine().snapshot().peers;
    let transports =
        peers.iter().filter(|known| known.name == peer).flat_map(|peer| &peer.transports);
    transports.map(|transport| transport.bytes_read).sum()
}

/// Returns the names of the transports that carried bytes.
fn used_transports(metrics: &MetricsSnapshot) -> String {
    metrics.by_transport.keys().copied().collect::<Vec<_>>().join(" ")
}

fn key(text: &str) -> Result<ObjectKey> {
    Ok(ObjectKey::new(text.as_bytes())?)
}
