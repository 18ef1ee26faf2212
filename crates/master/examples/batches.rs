//! Measures batches against a master in its own process: the rate, and the master's CPU time per
//! call, for several concurrent clients that do almost no work themselves.
//!
//! `cargo run --profile bench -p mooncake-master --example batches -- [ITEMS [CLIENTS [CALLS
//! [MASTER]]]]`
//!
//! The first three are lists, such as `1000,20000 1,2 probe,locate,put`. The defaults are 1000
//! items, 1, 2, 4 and 8 clients, and all three calls. `MASTER` is another `mooncake_master` to
//! measure instead, so that two builds can be measured in turns.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a program that prints, for its author"
)]

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    os::{linux::net::SocketAddrExt, unix::net::UnixStream},
    process::{Child, Command, Stdio},
    sync::Barrier,
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use mooncake_base::{ClientId, SegmentId};
use mooncake_proto::{
    native_frame::{self, ServerGreeting},
    v1::{self, request::Call, response},
};
use prost::Message;

/// The duration of each measurement.
const ROUND: Duration = Duration::from_secs(2);
/// The number of stored keys: eight batches of the usual size.
const KEYS: usize = 8000;
const KEY_BYTES: usize = 64;
const OBJECT_BYTES: u64 = 64;
/// CPU time ticks per second on Linux.
const TICKS: f64 = 100.0;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|word| word == "serve") {
        std::process::exit(mooncake_master::run(arguments[1..].to_vec()).into());
    }
    let numbers = |at: usize, or: &str| -> Vec<usize> {
        let text = arguments.get(at).map_or(or, String::as_str);
        text.split(',').map(|word| word.parse().unwrap()).collect()
    };
    let calls = arguments.get(2).map_or("probe,locate,put", String::as_str);
    let (mut master, address) = serve(arguments.get(3));
    let keys: Vec<Bytes> = (0..KEYS.max(numbers(0, "1000").into_iter().max().unwrap()))
        .map(|index| format!("{index:0>KEY_BYTES$}").into())
        .collect();
    // The owner of the memory stays connected, so that it does not expire.
    let _owner = fill(&address, &keys);
    println!(
        "{:>6} {:>7} {:>7}  {:>9}  {:>12}",
        "call", "items", "clients", "calls/s", "master us"
    );
    for items in numbers(0, "1000") {
        for call in calls.split(',') {
            for clients in numbers(1, "1,2,4,8") {
                let (rate, spent) = measure(&address, master.id(), &keys, (call, items, clients));
                println!("{call:>6} {items:>7} {clients:>7}  {rate:>9.0}  {spent:>12.1}");
            }
        }
    }
    master.kill().unwrap();
    master.wait().unwrap();
}

/// Starts a master in its own process. Returns its address, too.
fn serve(program: Option<&String>) -> (Child, String) {
    let mut command = match program {
        Some(program) => Command::new(program),
        None => {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.arg("serve");
            command
        }
    };
    let options = ["--rpc_port=0", "--metrics_port=0", "--rpc_address=127.0.0.1"];
    command.args(options).args(["--state_dir=none", "--client_ttl=3600"]);
    let mut master = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(master.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.split("rpc=").nth(1).unwrap().split(' ').next().unwrap();
    (master, address.to_owned())
}

/// Returns calls per second of this number of clients, and microseconds of the master's CPU time
/// per call.
fn measure(
    address: &str,
    master: u32,
    keys: &[Bytes],
    (call, items, clients): (&str, usize, usize),
) -> (f64, f64) {
    let start = Barrier::new(clients + 1);
    let until_spent = |before: u64, calls: usize, begun: Instant| {
        let spent = (ticks(master) - before) as f64 / TICKS * 1e6 / calls as f64;
        (calls as f64 / begun.elapsed().as_secs_f64(), spent)
    };
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..clients)
            .map(|number| {
                let start = &start;
                scope.spawn(move || {
                    let mut stream = connect(address);
                    let frames = frames(call, items, keys, number);
                    start.wait();
                    let begun = Instant::now();
                    let mut count = 0;
                    while begun.elapsed() < ROUND {
                        match call {
                            "put" => put(&mut stream, &frames[0], items, number),
                            _ => {
                                let frame = &frames[count % frames.len()];
                                stream.write_all(frame).unwrap();
                                pass_over(&mut stream);
                            }
                        }
                        count += 1;
                    }
                    count
                })
            })
            .collect();
        start.wait();
        let (before, begun) = (ticks(master), Instant::now());
        let calls = running.into_iter().map(|thread| thread.join().unwrap()).sum();
        until_spent(before, calls, begun)
    })
}

fn frames(call: &str, items: usize, keys: &[Bytes], number: usize) -> Vec<BytesMut> {
    let framed = |call| {
        let mut frame = BytesMut::new();
        native_frame::encode(&v1::Request { call: Some(call), ..Default::default() }, &mut frame)
            .unwrap();
        frame
    };
    let chunks = keys.chunks_exact(items).map(<[Bytes]>::to_vec);
    let caller = caller(number);
    match call {
        "probe" => chunks
            .map(|keys| {
                Call::Probe(v1::ProbeRequest {
                    caller: caller.clone(),
                    keys,
                    lease: true,
                    ..Default::default()
                })
            })
            .map(framed)
            .collect(),
        "locate" => chunks
            .map(|keys| {
                let caller = caller.clone();
                let keys = Some(v1::KeyColumn::pack(&keys));
                Call::Locate(v1::LocateRequest {
                    caller,
                    keys,
                    lease: true,
                    fence: true,
                    ..Default::default()
                })
            })
            .map(framed)
            .collect(),
        "put" => {
            let items = (0..items).map(|index| (new_key(number, index), OBJECT_BYTES));
            vec![framed(put_start(caller, items))]
        }
        _ => panic!("no such call: {call}"),
    }
}

/// Starts, ends and removes a batch of puts.
fn put(stream: &mut UnixStream, start: &[u8], items: usize, number: usize) {
    stream.write_all(start).unwrap();
    let Some(response::Call::PutStart(started)) = answer(stream).call else {
        panic!("another answer")
    };
    ask(stream, put_end(caller(number), started));
    let keys = (0..items).map(|index| new_key(number, index)).collect();
    ask(
        stream,
        Call::Remove(v1::RemoveRequest {
            caller: caller(number),
            keys,
            force: true,
            ..Default::default()
        }),
    );
}

/// Returns a key that no other client puts.
fn new_key(number: usize, index: usize) -> Bytes {
    format!("put-{number:028}{index:032}").into()
}

/// Puts the keys over the connection of a registered client.
fn fill(address: &str, keys: &[Bytes]) -> UnixStream {
    let mut stream = connect(address);
    for number in 0..64 {
        ask(
            &mut stream,
            Call::Register(v1::RegisterRequest {
                caller: caller(number),
                name: format!("host-{number}:1"),
                ..v1::RegisterRequest::default()
            }),
        );
    }
    let segment = v1::Segment {
        id: Bytes::copy_from_slice(&SegmentId::random().to_bytes()),
        incarnation: 1,
        name: "host-0:1".to_owned(),
        endpoint: "host-0:1".to_owned(),
        base: 1 << 40,
        length: 64 << 30,
        protocol: "tcp".to_owned(),
        kind: v1::SegmentKind::Memory.into(),
    };
    let segments = vec![segment];
    let mount = v1::MountRequest { caller: caller(0), segments, ..v1::MountRequest::default() };
    ask(&mut stream, Call::Mount(mount));
    for keys in keys.chunks(1000) {
        let start = put_start(caller(0), keys.iter().map(|key| (key, OBJECT_BYTES)));
        let response::Call::PutStart(started) = ask(&mut stream, start) else {
            panic!("another answer")
        };
        ask(&mut stream, put_end(caller(0), started));
    }
    stream
}

fn put_start<K: AsRef<[u8]>>(
    caller: Option<v1::Caller>,
    items: impl Iterator<Item = (K, u64)> + Clone,
) -> Call {
    let columns = Some(v1::PutColumns::pack(items));
    Call::PutStart(v1::PutStartRequest { caller, columns, ..v1::PutStartRequest::default() })
}

/// Returns the call that ends the puts that a start has started.
fn put_end(caller: Option<v1::Caller>, started: v1::PutStartResponse) -> Call {
    let v1::StartedColumns { versions, failures, .. } = started.columns.expect("columns");
    assert!(failures.is_empty(), "every put starts: {failures:?}");
    let columns = Some(v1::PutRefColumns { versions, ..v1::PutRefColumns::default() });
    Call::PutEnd(v1::PutEndRequest { caller, columns })
}

fn caller(number: usize) -> Option<v1::Caller> {
    let client = ClientId::from_bits(number as u128 + 1).to_bytes();
    Some(v1::Caller { client: Bytes::copy_from_slice(&client), tenant: String::new() })
}

/// Connects over the Unix socket that the master names.
fn connect(address: &str) -> UnixStream {
    let mut tcp = TcpStream::connect(address).unwrap();
    tcp.write_all(&native_frame::client_greeting()).unwrap();
    let greeting: ServerGreeting = receive(&mut tcp);
    let name = std::os::unix::net::SocketAddr::from_abstract_name(greeting.unix_socket).unwrap();
    let mut stream = UnixStream::connect_addr(&name).unwrap();
    stream.write_all(&native_frame::client_greeting()).unwrap();
    let _: ServerGreeting = receive(&mut stream);
    stream
}

fn ask(stream: &mut UnixStream, call: Call) -> response::Call {
    let mut frame = BytesMut::new();
    native_frame::encode(&v1::Request { call: Some(call), ..Default::default() }, &mut frame)
        .unwrap();
    stream.write_all(&frame).unwrap();
    answer(stream).call.unwrap()
}

fn answer(stream: &mut UnixStream) -> v1::Response {
    let response: v1::Response = receive(stream);
    assert!(!matches!(response.call, Some(response::Call::Failure(_))), "{response:?}");
    response
}

fn receive<M: Message + Default>(stream: &mut impl Read) -> M {
    let mut head = [0; 4];
    stream.read_exact(&mut head).unwrap();
    let mut body = vec![0; u32::from_le_bytes(head) as usize];
    stream.read_exact(&mut body).unwrap();
    M::decode(&body[..]).unwrap()
}

/// Receives a reply without decoding it.
fn pass_over(stream: &mut UnixStream) {
    let mut head = [0; 4];
    stream.read_exact(&mut head).unwrap();
    let mut left = u32::from_le_bytes(head) as usize;
    let mut some = [0; 64 << 10];
    while left > 0 {
        let part = left.min(some.len());
        left -= stream.read(&mut some[..part]).unwrap();
    }
}

/// Returns the CPU time that the process has used.
fn ticks(process: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields = text.rsplit(") ").next().unwrap().split(' ');
    fields.skip(11).take(2).map(|word| word.parse::<u64>().unwrap()).sum()
}
