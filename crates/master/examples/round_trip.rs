//! Measures one small call over the Unix socket, over TCP and without a socket, and compares it
//! with a ping-pong between two threads through the kernel at the same moment.
//!
//! Run it optimized: `cargo run --release -p mooncake-master --example round_trip [workers]`.
#![allow(clippy::print_stdout, reason = "a program that measures prints what it measured")]

use std::{
    error::Error,
    io::{Read, Write},
    net::TcpStream,
    os::{linux::net::SocketAddrExt, unix::net::UnixStream},
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use mooncake_master::{MasterConfig, Origin};
use mooncake_proto::{
    native_frame::{self, ServerGreeting},
    v1::{self, request},
};
use prost::Message;

const CALLS: usize = 20_000;

fn main() -> Result<(), Box<dyn Error>> {
    let workers = std::env::args().nth(1).map_or(Ok(2), |text| text.parse())?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(workers).enable_all().build()?;
    let master = runtime.block_on(mooncake_master::start(MasterConfig::embedded()))?;
    println!("workers={workers} calls={CALLS}");
    // Three rounds, so that interference from other load on the machine shows.
    for _ in 0..3 {
        report("ping-pong of two threads", &mut ping_pong()?);

        let mut tcp = TcpStream::connect(master.addresses().rpc)?;
        tcp.set_nodelay(true)?;
        let greeting = greet(&mut tcp)?;
        let name = std::os::unix::net::SocketAddr::from_abstract_name(greeting.unix_socket)?;
        let mut unix = UnixStream::connect_addr(&name)?;
        greet(&mut unix)?;
        report("probe over the Unix socket", &mut probes(&mut unix)?);
        report("probe over TCP", &mut probes(&mut tcp)?);

        let service = master.service();
        let origin = Origin::in_process();
        let mut times = timed(|| {
            service.dispatch(probe(), &origin);
            Ok(())
        })?;
        report("probe without a socket", &mut times);
    }
    runtime.block_on(master.stop());
    Ok(())
}

fn probe() -> v1::Request {
    let keys = vec![Bytes::from_static(b"a key of a usual length, as servers use them")];
    let call = request::Call::Probe(v1::ProbeRequest {
        caller: None,
        keys,
        lease: true,
        ..Default::default()
    });
    v1::Request { call: Some(call), ..Default::default() }
}

fn greet<S: Read + Write>(stream: &mut S) -> Result<ServerGreeting, Box<dyn Error>> {
    stream.write_all(&native_frame::client_greeting())?;
    receive(stream, &mut BytesMut::new())
}

fn probes<S: Read + Write>(stream: &mut S) -> Result<Vec<Duration>, Box<dyn Error>> {
    let mut output = BytesMut::new();
    let mut input = BytesMut::new();
    timed(|| {
        output.clear();
        native_frame::encode(&probe(), &mut output)?;
        stream.write_all(&output)?;
        let _: v1::Response = receive(stream, &mut input)?;
        Ok(())
    })
}

fn receive<M: Message + Default>(
    stream: &mut impl Read,
    input: &mut BytesMut,
) -> Result<M, Box<dyn Error>> {
    let mut chunk = [0; 4096];
    loop {
        if let Some(message) = native_frame::decode(input, native_frame::FRAME_BYTES_MAX)? {
            return Ok(message);
        }
        match stream.read(&mut chunk)? {
            0 => return Err("the master closed".into()),
            count => input.extend_from_slice(&chunk[..count]),
        }
    }
}

/// Times one byte there and back over a socket pair with the other end in another thread.
fn ping_pong() -> Result<Vec<Duration>, Box<dyn Error>> {
    let (mut near, mut far) = UnixStream::pair()?;
    let echo = std::thread::spawn(move || {
        let mut byte = [0; 1];
        while far.read_exact(&mut byte).is_ok() && far.write_all(&byte).is_ok() {}
    });
    let mut byte = [0; 1];
    let times = timed(|| {
        near.write_all(&byte)?;
        Ok(near.read_exact(&mut byte)?)
    });
    drop(near);
    let _ = echo.join();
    times
}

fn timed(
    mut call: impl FnMut() -> Result<(), Box<dyn Error>>,
) -> Result<Vec<Duration>, Box<dyn Error>> {
    let mut times = Vec::with_capacity(CALLS);
    for _ in 0..CALLS {
        let begun = Instant::now();
        call()?;
        times.push(begun.elapsed());
    }
    Ok(times)
}

fn report(what: &str, times: &mut [Duration]) {
    times.sort_unstable();
    let at = |share: usize| times[(times.len() - 1) * share / 100];
    println!("  {what:28} median {:>10.1?}  p99 {:>10.1?}", at(50), at(99));
}
