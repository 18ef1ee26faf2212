//! A TCP proxy that cuts connections at random places, also in the middle of a message and between a
//! request and its answer.

use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use mooncake_base::sync::Mutex;

use crate::Random;

/// The maximum time for which the proxy refuses connections after a cut.
const PAUSE_MAX_MS: u64 = 60;

/// A proxy in front of a server. Dropping it closes all connections.
#[derive(Debug)]
pub struct CutLink {
    address: SocketAddr,
    state: Arc<ProxyState>,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct ProxyState {
    server: SocketAddr,
    /// The mean number of bytes until a connection is cut.
    mean_bytes: u64,
    random: Mutex<Random>,
    is_healed: AtomicBool,
    is_over: AtomicBool,
    cuts: AtomicU64,
    /// New connections are closed at once until this time.
    closed_until: Mutex<Instant>,
    sockets: Mutex<Vec<TcpStream>>,
}

impl CutLink {
    /// Starts a proxy on a free port of this host. Each connection is cut after a random number of
    /// bytes in each direction, `mean_bytes` on average.
    ///
    /// # Errors
    /// The port cannot be bound.
    pub fn start(server: SocketAddr, mean_bytes: u64, random: Random) -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let state = Arc::new(ProxyState {
            server,
            mean_bytes,
            random: Mutex::new(random),
            is_healed: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            cuts: AtomicU64::new(0),
            closed_until: Mutex::new(Instant::now()),
            sockets: Mutex::default(),
        });
        let accepting = Arc::clone(&state);
        let acceptor = std::thread::spawn(move || accepting.accept(&listener));
        Ok(Self { address, state, acceptor: Some(acceptor) })
    }

    /// The address of the proxy.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the number of connections that were cut.
    pub fn cuts(&self) -> u64 {
        self.state.cuts.load(Ordering::Relaxed)
    }

    /// Stops cutting new connections.
    pub fn heal(&self) {
        self.state.is_healed.store(true, Ordering::Relaxed);
    }
}

impl Drop for CutLink {
    fn drop(&mut self) {
        self.state.is_over.store(true, Ordering::Relaxed);
        // Wakes the accepting thread.
        let _ = TcpStream::connect(self.address);
        for socket in self.state.sockets.lock().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

impl ProxyState {
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        while let Ok((client, _)) = listener.accept() {
            if self.is_over.load(Ordering::Relaxed) {
                return;
            }
            if Instant::now() < *self.closed_until.lock() {
                continue;
            }
            let Ok(server) = TcpStream::connect(self.server) else { continue };
            for (from, to) in [(&client, &server), (&server, &client)] {
                let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) else { return };
                let _ = (from.set_nodelay(true), to.set_nodelay(true));
                let state = Arc::clone(self);
                std::thread::spawn(move || state.forward(from, to));
            }
            self.sockets.lock().extend([client, server]);
        }
    }

    /// Forwards bytes until the connection ends or is cut.
    fn forward(&self, mut from: TcpStream, mut to: TcpStream) {
        let is_healed = || self.is_healed.load(Ordering::Relaxed);
        let mut left = match is_healed() {
            true => usize::MAX,
            false => self.random.lock().below(2 * self.mean_bytes) as usize,
        };
        let mut buffer = [0; 16 << 10];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            let passed = if is_healed() { count } else { count.min(left) };
            left -= passed.min(left);
            if to.write_all(&buffer[..passed]).is_err() {
                break;
            }
            if passed < count {
                self.cut();
                break;
            }
        }
        // Both fail if the other direction has ended already.
        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
    }

    fn cut(&self) {
        self.cuts.fetch_add(1, Ordering::Relaxed);
        let mut random = self.random.lock();
        if random.below(8) == 0 {
            let pause = Duration::from_millis(random.below(PAUSE_MAX_MS));
            *self.closed_until.lock() = Instant::now() + pause;
        }
    }
}
