//! A connection moves to a dedicated thread during a burst of calls, and leaves the thread in every
//! possible way.

use bytes::{Bytes, BytesMut};
use mooncake_base::SystemClock;
use mooncake_proto::{
    native_frame::{self, FRAME_BYTES_MAX, ServerGreeting},
    v1::{self, request::Call, response},
};
use prost::Message;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    task::{JoinSet, yield_now},
    time::{sleep, timeout},
};

use mooncake_os::dedicated_thread::BURST_CALLS;

use super::*;
use crate::{
    service::{Service, connection::ServerContext, native::serve_local},
    state::Rules,
};

/// Longer than any wait in these tests on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// A served connection: the client's end and the serving task.
struct Served {
    stream: UnixStream,
    input: BytesMut,
    context: ServerContext,
}

fn context(dedicated_threads: usize) -> ServerContext {
    let service = Arc::new(Service::new(Rules::default(), SystemClock::shared()));
    ServerContext::for_tests(service, dedicated_threads)
}

async fn connect(context: &ServerContext) -> Served {
    let (near, far) = UnixStream::pair().unwrap();
    let connection = super::super::connection::Connection::new(context, true, None);
    context.spawn(serve_local(far, connection, context.clone()));
    let mut served = Served { stream: near, input: BytesMut::new(), context: context.clone() };
    served.stream.write_all(&native_frame::client_greeting()).await.unwrap();
    served.receive::<ServerGreeting>().await.unwrap();
    served
}

impl Served {
    /// Returns the next message; `None` if the connection has ended.
    async fn receive<M: Message + Default>(&mut self) -> Option<M> {
        loop {
            if let Some(message) = native_frame::decode(&mut self.input, FRAME_BYTES_MAX).unwrap() {
                return Some(message);
            }
            let read = timeout(LONG, self.stream.read_buf(&mut self.input)).await.unwrap();
            if !read.is_ok_and(|count| count > 0) {
                return None;
            }
        }
    }

    /// Makes one call. Returns whether a reply came.
    async fn ask(&mut self) -> bool {
        let keys = vec![Bytes::from_static(b"missing key")];
        let call = Call::Probe(v1::ProbeRequest {
            caller: None,
            keys,
            lease: false,
            ..Default::default()
        });
        let mut frame = BytesMut::new();
        let request = v1::Request { call: Some(call), ..Default::default() };
        native_frame::encode(&request, &mut frame).unwrap();
        if self.stream.write_all(&frame).await.is_err() {
            return false;
        }
        let answer = self.receive::<v1::Response>().await;
        answer.is_some_and(|answer| matches!(answer.call, Some(response::Call::Probe(_))))
    }

    /// Makes calls in a burst until `free` dedicated threads are free.
    async fn ask_until(&mut self, free: usize) {
        let until = async {
            while self.context.dedicated_threads.available_permits() != free {
                assert!(self.ask().await, "a call was not answered");
            }
        };
        timeout(LONG, until).await.expect("it is not seated");
    }
}

async fn wait_for_free_threads(context: &ServerContext, count: usize) {
    let freed = async {
        while context.dedicated_threads.available_permits() != count {
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(LONG, freed).await.expect("a dedicated thread was not freed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn burst_gets_dedicated_thread_until_pause() {
    let context = context(1);
    let mut served = connect(&context).await;
    for _ in 0..3 {
        served.ask_until(0).await;
        assert!(served.ask().await, "answered on the dedicated thread");
        wait_for_free_threads(&context, 1).await;
        assert!(served.ask().await, "it is answered beside others");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partial_frame_frees_thread_and_is_not_lost() {
    let context = context(1);
    let mut served = connect(&context).await;
    served.ask_until(0).await;
    let mut frame = BytesMut::new();
    native_frame::encode(&v1::Request::default(), &mut frame).unwrap();
    let padded = v1::Request {
        call: Some(Call::Probe(v1::ProbeRequest {
            keys: vec![Bytes::from(vec![b'k'; 100])],
            ..Default::default()
        })),
        ..Default::default()
    };
    native_frame::encode(&padded, &mut frame).unwrap();
    let (first, second) = frame.split_at(frame.len() / 2);
    served.stream.write_all(first).await.unwrap();
    wait_for_free_threads(&context, 1).await;
    served.stream.write_all(second).await.unwrap();
    for _ in 0..2 {
        assert!(served.receive::<v1::Response>().await.is_some());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_free_thread_stays_on_runtime() {
    let context = context(1);
    let mut first = connect(&context).await;
    let mut second = connect(&context).await;
    first.ask_until(0).await;
    for _ in 0..4 * BURST_CALLS {
        assert!(second.ask().await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_and_kill_end_connection_on_dedicated_thread() {
    for is_kill in [false, true] {
        let context = context(1);
        let mut served = connect(&context).await;
        served.ask_until(0).await;
        let token = if is_kill { &context.kill } else { &context.stop };
        token.cancel();
        context.tasks.close();
        timeout(LONG, context.tasks.wait()).await.expect("the task ends");
        wait_for_free_threads(&context, 1).await;
        assert!(served.receive::<v1::Response>().await.is_none(), "its socket is closed");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_ends_connection_whose_call_waits() {
    let context = context(0);
    // Its memory is awaited: it has come from another master.
    let log_mark = Some(v1::LogMark { master: 9, timeline: 9, synced_frame: 9 });
    let caller = Some(v1::Caller { client: Bytes::from(vec![7; 16]), tenant: String::new() });
    let register = v1::RegisterRequest { caller: caller.clone(), log_mark, ..Default::default() };
    let columns = Some(v1::PutColumns::pack([("key", 8)]));
    let put = v1::PutStartRequest { caller, columns, ..Default::default() };
    let mut served = connect(&context).await;
    let mut frames = BytesMut::new();
    for call in [Call::Register(register), Call::PutStart(put)] {
        let request = v1::Request { call: Some(call), ..Default::default() };
        native_frame::encode(&request, &mut frames).unwrap();
    }
    served.stream.write_all(&frames).await.unwrap();
    while served.context.service.totals().clients == 0 {
        yield_now().await;
    }
    context.stop.cancel();
    context.tasks.close();
    timeout(LONG, context.tasks.wait()).await.expect("the task ends");
    let first = served.receive::<v1::Response>().await.unwrap();
    assert!(matches!(first.call, Some(response::Call::Register(_))));
    assert!(served.receive::<v1::Response>().await.is_none(), "the put has not begun");
}

/// The peer writes calls ahead, so that there is always one to read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_ends_connection_of_peer_that_always_calls() {
    for dedicated_threads in [0, 1] {
        let context = context(dedicated_threads);
        let served = connect(&context).await;
        let (mut reader, mut writer) = served.stream.into_split();
        let mut frames = BytesMut::new();
        for _ in 0..100 {
            native_frame::encode(&v1::Request::default(), &mut frames).unwrap();
        }
        let mut peer = JoinSet::new();
        peer.spawn(async move { while writer.write_all(&frames).await.is_ok() {} });
        let mut input = BytesMut::new();
        while input.len() < 100_000 {
            reader.read_buf(&mut input).await.unwrap();
        }
        let stop = context.stop.clone();
        peer.spawn(async move {
            stop.cancel();
            while reader.read_buf(&mut input).await.is_ok_and(|count| count > 0) {
                input.clear();
            }
        });
        context.tasks.close();
        timeout(LONG, context.tasks.wait()).await.expect("the task ends");
        timeout(LONG, peer.join_all()).await.expect("its socket is closed");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closed_connection_frees_thread_and_session() {
    let context = context(1);
    let mut served = connect(&context).await;
    served.ask_until(0).await;
    drop(served);
    wait_for_free_threads(&context, 1).await;
    let gone = async {
        while context.permits.available() != 8 {
            yield_now().await;
        }
    };
    timeout(LONG, gone).await.expect("the connection ends");
}
