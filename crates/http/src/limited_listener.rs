//! A listener for HTTP servers that limits the number of connections and the time that each may
//! take.
//!
//! A peer that sends or reads a byte now and then makes progress and would hold a connection for
//! ever. Therefore a request must arrive, and a response must leave, at a minimum speed. When all
//! places are taken, the connection that has been without traffic for the longest time is closed.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::{extract::connect_info::Connected, serve::IncomingStream};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
    time::{Instant, Sleep, sleep_until, timeout},
};

/// The pause after a failed accept, for instance when the process has no free file descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How long a new connection waits for the end of one that gives way, before another one does.
const ROOM_INTERVAL: Duration = Duration::from_millis(50);

/// The limits of the connections of one HTTP server.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The maximum number of connections. Above it, the one without traffic for the longest time
    /// gives way.
    pub connections_max: usize,
    /// The time without traffic after which a connection gives way to a new one.
    pub quiet_time_min: Duration,
    /// The time of an idle connection, of a request beside its bytes, and of a response beside its
    /// bytes.
    pub time_max: Duration,
    /// The minimum speed of requests and responses.
    pub bytes_per_second_min: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 4096,
            quiet_time_min: Duration::from_millis(500),
            time_max: Duration::from_secs(60),
            bytes_per_second_min: 64 << 10,
        }
    }
}

/// A listener that limits its connections.
#[derive(Debug)]
pub struct LimitedListener {
    listener: TcpListener,
    limits: Limits,
    permits: Arc<Semaphore>,
    /// The connections that were open when the limit was last reached, and later ones.
    open: Vec<OpenConnection>,
    /// The origin of the times of traffic.
    start: Instant,
}

/// The listener's side of a connection.
#[derive(Debug)]
struct OpenConnection {
    /// Milliseconds from the start of the listener to the last traffic.
    last_traffic: Arc<AtomicU64>,
    /// Ends the connection. Closed once the connection is.
    cut: oneshot::Sender<()>,
}

impl LimitedListener {
    /// Wraps a listener, with the usual limits.
    pub fn new(listener: TcpListener) -> Self {
        Self::with_limits(listener, Limits::default())
    }

    /// Wraps a listener.
    pub fn with_limits(listener: TcpListener, limits: Limits) -> Self {
        let permits = Arc::new(Semaphore::new(limits.connections_max));
        Self { listener, limits, permits, open: Vec::new(), start: Instant::now() }
    }

    /// Acquires a place for a connection; ends another connection if all are taken.
    async fn acquire(&mut self) -> OwnedSemaphorePermit {
        loop {
            if let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() {
                return permit;
            }
            self.end_quietest();
            // A permit that arrives earlier ends the wait, and is taken above.
            drop(timeout(ROOM_INTERVAL, self.permits.acquire()).await);
        }
    }

    fn end_quietest(&mut self) {
        self.open.retain(|open| !open.cut.is_closed());
        let last = |open: &OpenConnection| open.last_traffic.load(Ordering::Relaxed);
        let quietest = self.open.iter().enumerate().min_by_key(|(_, open)| last(open));
        let Some((index, open)) = quietest else { return };
        let since = self.start + Duration::from_millis(last(open));
        if since.elapsed() >= self.limits.quiet_time_min {
            // An error means that the connection has just ended.
            let _ = self.open.swap_remove(index).cut.send(());
        }
    }

    fn admit(&mut self, stream: TcpStream, permit: OwnedSemaphorePermit) -> LimitedStream {
        if self.open.len() >= 2 * self.limits.connections_max {
            self.open.retain(|open| !open.cut.is_closed());
        }
        let now = Instant::now();
        let (cut, receiver) = oneshot::channel();
        let last_traffic = Arc::new(AtomicU64::new(0));
        self.open.push(OpenConnection { last_traffic: Arc::clone(&last_traffic), cut });
        let pace = Pace::new(now);
        let timer = Box::pin(sleep_until(pace.deadline(&self.limits)));
        let stream = LimitedStream {
            stream,
            limits: self.limits,
            pace,
            timer,
            last_traffic,
            start: self.start,
            cut: Some(receiver),
            is_cut: false,
            _permit: permit,
        };
        stream.record_traffic(now);
        stream
    }
}

impl axum::serve::Listener for LimitedListener {
    type Io = LimitedStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (LimitedStream, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok((stream, peer)) => {
                    let permit = self.acquire().await;
                    return (self.admit(stream, permit), peer);
                }
                Err(error) => {
                    tracing::debug!(%error, "a connection could not be accepted");
                    self.end_quietest();
                    sleep_until(Instant::now() + ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// The address of a connection's peer, for handlers.
#[derive(Debug, Clone, Copy)]
pub struct Peer(pub SocketAddr);

impl Connected<IncomingStream<'_, LimitedListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, LimitedListener>) -> Self {
        Self(*stream.remote_addr())
    }
}

/// The direction of the bytes that a connection moved last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    /// A request arrives.
    In,
    /// A response leaves, or has left.
    Out,
}

/// The time limits of one connection.
#[derive(Debug)]
struct Pace {
    direction: Direction,
    /// The beginning of the request or the response.
    since: Instant,
    /// The bytes of it that were moved.
    bytes: u64,
}

impl Pace {
    const fn new(now: Instant) -> Self {
        Self { direction: Direction::Out, since: now, bytes: 0 }
    }

    /// Records moved bytes.
    fn record(&mut self, direction: Direction, bytes: usize, now: Instant) {
        if self.direction != direction {
            *self = Self { direction, since: now, bytes: 0 };
        }
        self.bytes += bytes as u64;
    }

    /// The time at which the request must have arrived, or the next one must begin.
    fn deadline(&self, limits: &Limits) -> Instant {
        let transfer = Duration::from_secs(self.bytes / limits.bytes_per_second_min);
        self.since + limits.time_max + transfer
    }
}

/// A connection with time limits, which counts against the limit of its listener.
#[derive(Debug)]
pub struct LimitedStream {
    stream: TcpStream,
    limits: Limits,
    pace: Pace,
    timer: Pin<Box<Sleep>>,
    last_traffic: Arc<AtomicU64>,
    start: Instant,
    /// `None` once the connection was told to end, or the listener is gone.
    cut: Option<oneshot::Receiver<()>>,
    is_cut: bool,
    _permit: OwnedSemaphorePermit,
}

impl LimitedStream {
    fn record_traffic(&self, now: Instant) {
        let time = now.saturating_duration_since(self.start).as_millis() as u64;
        self.last_traffic.store(time, Ordering::Relaxed);
    }

    fn record(&mut self, direction: Direction, bytes: usize) {
        let now = Instant::now();
        self.record_traffic(now);
        self.pace.record(direction, bytes, now);
        self.timer.as_mut().reset(self.pace.deadline(&self.limits));
    }

    /// Returns an error once the connection has no more time.
    fn poll_limits<T>(&mut self, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if let Some(cut) = &mut self.cut
            && let Poll::Ready(message) = Pin::new(cut).poll(context)
        {
            self.cut = None;
            self.is_cut = message.is_ok();
        }
        if self.is_cut {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        self.timer.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for LimitedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        match Pin::new(&mut self.stream).poll_read(context, into) {
            Poll::Ready(read) => {
                self.record(Direction::In, into.filled().len() - before);
                Poll::Ready(read)
            }
            Poll::Pending => self.poll_limits(context),
        }
    }
}

impl AsyncWrite for LimitedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match Pin::new(&mut self.stream).poll_write(context, bytes) {
            Poll::Ready(written) => {
                self.record(Direction::Out, *written.as_ref().unwrap_or(&0));
                Poll::Ready(written)
            }
            Poll::Pending => self.poll_limits(context),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        net::TcpStream as BlockingStream,
        thread,
    };

    use axum::{Router, routing::get};

    use super::*;

    /// The time limit of a test whose claim is that something ends.
    const PATIENCE: Duration = Duration::from_secs(20);

    /// Serves one page on a thread that ends with the test process.
    fn serve(limits: Limits) -> SocketAddr {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        thread::spawn(move || {
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener).unwrap();
                let large = || async { "x".repeat(16 << 20) };
                let app = Router::new().route("/", get(|| async { "page" }));
                let app = app.route("/large", get(large));
                axum::serve(LimitedListener::with_limits(listener, limits), app).await
            })
        });
        address
    }

    fn connect(address: SocketAddr) -> BlockingStream {
        let stream = BlockingStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    fn get_page(address: SocketAddr) -> String {
        let mut stream = connect(address);
        stream.write_all(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn quiet_connections_give_way() {
        let quiet_time_min = Duration::from_millis(50);
        let limits = Limits { connections_max: 8, quiet_time_min, ..Limits::default() };
        let address = serve(limits);
        let quiet: Vec<_> = (0..20).map(|_| connect(address)).collect();
        assert!(get_page(address).ends_with("page"));
        drop(quiet);
    }

    #[test]
    fn trickled_requests_and_responses_end() {
        let time_max = Duration::from_millis(200);
        // What the kernel buffers counts as moved.
        let bytes_per_second_min = 1 << 30;
        let address = serve(Limits { time_max, bytes_per_second_min, ..Limits::default() });
        for (request, is_read) in
            [("GET / HTTP/1.1\r\nX: ", false), ("GET /large HTTP/1.1\r\nHost: h\r\n\r\n", true)]
        {
            let begin = Instant::now();
            let mut stream = connect(address);
            stream.write_all(request.as_bytes()).unwrap();
            stream.set_read_timeout(Some(time_max / 4)).unwrap();
            // Each byte comes in time. The whole does not.
            loop {
                assert!(begin.elapsed() < PATIENCE, "the connection goes on: {request}");
                let sent = if is_read { Ok(()) } else { stream.write_all(b"x") };
                match stream.read(&mut [0; 1]) {
                    Ok(1) if is_read && begin.elapsed() < time_max * 4 => {
                        thread::park_timeout(time_max / 4)
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock && sent.is_ok() => {}
                    _ => break,
                }
            }
            if is_read {
                let mut rest = Vec::new();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                let _ = stream.read_to_end(&mut rest);
                assert!(rest.len() < 16 << 20, "the response was cut off");
            }
        }
    }

    #[test]
    fn deadline_moves_with_the_bytes_of_one_direction_only() {
        let (limits, start) = (Limits::default(), Instant::now());
        let mut pace = Pace::new(start);
        let second = Duration::from_secs(1);
        assert_eq!(pace.deadline(&limits), start + limits.time_max);
        pace.record(Direction::In, 1, start + second);
        pace.record(Direction::In, 1, start + 30 * second);
        assert_eq!(pace.deadline(&limits), start + second + limits.time_max);
        pace.record(Direction::In, 2 << 16, start + 31 * second);
        assert_eq!(pace.deadline(&limits), start + 3 * second + limits.time_max);
        pace.record(Direction::Out, 1, start + 40 * second);
        assert_eq!(pace.deadline(&limits), start + 40 * second + limits.time_max);
    }
}
