//! Measures the time of a 4-byte message between two processes of this host that wait for it by
//! polling, beside a ping-pong over a TCP socket that both poll: the machine's limit without shared
//! memory.
//!
//! `cargo run --profile bench -p mooncake-benches --bin one_way [-- ROUNDS]`
//!
//! The times are half of a round trip: median, and the share of rounds below 5 us.
#![allow(clippy::print_stdout, reason = "the program prints a table")]
#![allow(unsafe_code, reason = "messages read and write memory of the program")]

use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, TcpListener, TcpStream},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use mooncake_collective::{Completion, Context, ContextConfig, Group, GroupConfig, HostRange};

const LIMIT: Duration = Duration::from_secs(30);
const GOAL: Duration = Duration::from_micros(5);

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [coordinator, socket, rounds] = arguments.as_slice() {
        let rounds: usize = rounds.parse()?;
        messages(&group(1, Some(coordinator))?.1, 1, rounds)?;
        return bytes(TcpStream::connect(socket)?, 1, rounds).map(drop);
    }
    let rounds: usize = arguments.first().map_or(Ok(50_000), |rounds| rounds.parse())?;
    let context = context(0, None)?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut peer = Command::new(std::env::current_exe()?)
        .args([context.coordinator_address(), &listener.local_addr()?.to_string()])
        .arg(rounds.to_string())
        .stdin(Stdio::null())
        .spawn()?;
    let times = messages(&made(&context, 0)?, 0, rounds)?;
    report("message of a group", times);
    report("TCP socket, polled", bytes(listener.accept()?.0, 0, rounds)?);
    ensure!(peer.wait()?.success(), "the other process has failed");
    Ok(())
}

fn context(rank: u32, coordinator: Option<&str>) -> Result<Context> {
    Ok(Context::start(&ContextConfig {
        rank,
        host: IpAddr::V4(Ipv4Addr::LOCALHOST),
        coordinator: coordinator.map(str::to_owned),
        token: None,
        fabric: None,
        heartbeat_timeout: LIMIT,
        bootstrap_timeout: LIMIT,
    })?)
}

fn made(context: &Context, slot: usize) -> Result<Group> {
    Ok(context.group(&GroupConfig {
        name: "one-way".to_owned(),
        slot,
        declared: 2,
        capacity: 2,
        is_extension: false,
        removes_lost: true,
        first_rank: 0,
        made_within: LIMIT,
    })?)
}

fn group(rank: u32, coordinator: Option<&str>) -> Result<(Context, Group)> {
    let context = context(rank, coordinator)?;
    let group = made(&context, rank as usize)?;
    Ok((context, group))
}

/// Exchanges messages, and returns the time of each round trip.
fn messages(group: &Group, rank: usize, rounds: usize) -> Result<Vec<Duration>> {
    let (mut own, mut other) = ([0_u8; 4], [0_u8; 4]);
    let lent = |bytes: &mut [u8; 4]| {
        // SAFETY: both arrays live until the end of this function, which waits for each operation.
        unsafe { HostRange::new(bytes.as_mut_ptr() as usize, bytes.len()) }
    };
    let (source, target) = (lent(&mut own), lent(&mut other));
    let wait = |completion: Completion| -> Result<()> {
        ensure!(completion.wait(LIMIT), "no answer");
        completion
            .outcome()
            .and_then(|outcome| outcome.error)
            .map_or(Ok(()), |error| Err(error.into()))
    };
    let mut times = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        let begun = Instant::now();
        if rank == 0 {
            let sent = group.send(source, 1, 0)?;
            wait(group.receive(target, Some(1), 0)?)?;
            times.push(begun.elapsed());
            wait(sent)?;
        } else {
            wait(group.receive(target, Some(0), 0)?)?;
            wait(group.send(source, 0, 0)?)?;
        }
    }
    Ok(times)
}

/// Exchanges bytes over a socket that both sides poll.
fn bytes(mut stream: TcpStream, rank: usize, rounds: usize) -> Result<Vec<Duration>> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    let receive = |mut stream: &TcpStream| -> Result<()> {
        let mut bytes = [0; 4];
        loop {
            match stream.read(&mut bytes) {
                Ok(4) => return Ok(()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
                other => {
                    other.context("the other process has ended")?;
                }
            }
        }
    };
    let mut times = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        let begun = Instant::now();
        if rank == 0 {
            stream.write_all(&[1; 4])?;
            receive(&stream)?;
            times.push(begun.elapsed());
        } else {
            receive(&stream)?;
            stream.write_all(&[1; 4])?;
        }
    }
    Ok(times)
}

fn report(what: &str, mut times: Vec<Duration>) {
    times.iter_mut().for_each(|time| *time /= 2);
    times.sort_unstable();
    let median = times[times.len() / 2];
    let within = times.partition_point(|time| *time < GOAL) * 100 / times.len();
    println!("{what}: median {:.2} us, {within} % below 5 us", median.as_secs_f64() * 1e6);
}
