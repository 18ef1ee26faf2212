//! A TCP proxy that cuts connections at random: before a request is delivered, in the middle of a
//! message, and between a request and its answer.

use std::{
    io::{Read, Result, Write},
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

/// The maximum time for which the proxy refuses connections after a cut by [`CutRule::MeanBytes`].
const PAUSE_MAX_MS: u64 = 60;

/// [`CutRule::OnePieceIn`] does not cut the first pieces of each direction: the greeting.
const GREETING_PIECES: u64 = 1;

/// The rule that decides where connections are cut.
#[derive(Debug, Clone, Copy)]
pub enum CutRule {
    /// Each direction of a connection is cut after a random number of bytes, this many on average,
    /// also within the greeting. After some cuts no connection is accepted for a moment.
    MeanBytes(u64),
    /// One of this many pieces that a peer sends is lost, delivered to its half, or, if it is a
    /// request, delivered without its answer.
    OnePieceIn(u64),
}

/// A proxy in front of a server. Dropping it closes all connections.
#[derive(Debug)]
pub struct CuttingProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    server: SocketAddr,
    rule: CutRule,
    random: Mutex<Random>,
    is_healed: AtomicBool,
    is_over: AtomicBool,
    cuts: AtomicU64,
    /// New connections are closed at once until this time.
    closed_until: Mutex<Instant>,
    sockets: Mutex<Vec<TcpStream>>,
}

/// One direction of a connection.
#[derive(Debug)]
struct Direction {
    from: TcpStream,
    to: TcpStream,
    /// Whether requests pass here, and not answers.
    is_request: bool,
    /// Set once a request was delivered whose answer must not arrive.
    is_answer_lost: Arc<AtomicBool>,
    pieces: u64,
    bytes_left: u64,
    random: Random,
    shared: Arc<Shared>,
}

impl CuttingProxy {
    /// Starts a proxy on a free port of this host.
    ///
    /// # Errors
    /// No port can be bound.
    pub fn start(server: SocketAddr, rule: CutRule, random: Random) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            server,
            rule,
            random: Mutex::new(random),
            is_healed: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            cuts: AtomicU64::new(0),
            closed_until: Mutex::new(Instant::now()),
            sockets: Mutex::default(),
        });
        let accepting = Arc::clone(&shared);
        let acceptor = std::thread::spawn(move || accepting.accept(&listener));
        Ok(Self { address, shared, acceptor: Some(acceptor) })
    }

    /// Returns the address that clients connect to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the number of connections that were cut.
    pub fn cuts(&self) -> u64 {
        self.shared.cuts.load(Ordering::Relaxed)
    }

    /// Cuts no connection from now on.
    pub fn heal(&self) {
        self.shared.is_healed.store(true, Ordering::Relaxed);
    }
}

impl Drop for CuttingProxy {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        // Wakes the accepting thread.
        let _ = TcpStream::connect(self.address);
        for socket in self.shared.sockets.lock().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

impl Shared {
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        while let Ok((client, _)) = listener.accept() {
            if self.is_over.load(Ordering::Relaxed) {
                return;
            }
            if Instant::now() < *self.closed_until.lock() {
                continue;
            }
            let Ok(server) = TcpStream::connect(self.server) else { continue };
            if self.forward(&client, &server).is_ok() {
                self.sockets.lock().extend([client, server]);
            }
        }
    }

    /// Starts a thread per direction. They end when either peer or a cut ends the connection.
    fn forward(self: &Arc<Self>, client: &TcpStream, server: &TcpStream) -> Result<()> {
        let is_answer_lost = Arc::<AtomicBool>::default();
        for (from, to, is_request) in [(client, server, true), (server, client, false)] {
            let mut random = Random::from_seed(self.random.lock().number());
            let bytes_left = match self.rule {
                CutRule::MeanBytes(mean) => random.below(2 * mean),
                CutRule::OnePieceIn(_) => u64::MAX,
            };
            let direction = Direction {
                from: from.try_clone()?,
                to: to.try_clone()?,
                is_request,
                is_answer_lost: Arc::clone(&is_answer_lost),
                pieces: 0,
                bytes_left,
                random,
                shared: Arc::clone(self),
            };
            direction.to.set_nodelay(true)?;
            std::thread::spawn(move || direction.run());
        }
        Ok(())
    }

    fn record_cut(&self, random: &mut Random) {
        self.cuts.fetch_add(1, Ordering::Relaxed);
        if matches!(self.rule, CutRule::MeanBytes(_)) && random.below(8) == 0 {
            let pause = Duration::from_millis(random.below(PAUSE_MAX_MS));
            *self.closed_until.lock() = Instant::now() + pause;
        }
    }
}

impl Direction {
    /// Forwards bytes until the connection ends or is cut.
    fn run(mut self) {
        let mut piece = vec![0; 64 << 10];
        while let Ok(count @ 1..) = self.from.read(&mut piece) {
            let cut_at = self.cut_at(count);
            if self.to.write_all(&piece[..cut_at.unwrap_or(count)]).is_err() {
                break;
            }
            if cut_at.is_some() {
                self.shared.record_cut(&mut self.random);
                break;
            }
        }
        // Both fail if the other direction has ended already.
        let _ = (self.from.shutdown(Shutdown::Both), self.to.shutdown(Shutdown::Both));
    }

    /// Returns how many of the next bytes are delivered before the connection is cut; `None` if it
    /// is not cut.
    fn cut_at(&mut self, count: usize) -> Option<usize> {
        if self.shared.is_healed.load(Ordering::Relaxed) {
            return None;
        }
        match self.shared.rule {
            CutRule::MeanBytes(_) => {
                let delivered = self.bytes_left.min(count as u64) as usize;
                self.bytes_left -= delivered as u64;
                (delivered < count).then_some(delivered)
            }
            CutRule::OnePieceIn(pieces) => {
                self.pieces += 1;
                let is_lost = !self.is_request && self.is_answer_lost.load(Ordering::Relaxed);
                let is_due = self.pieces > GREETING_PIECES && self.random.below(pieces) == 0;
                if !is_lost && !is_due {
                    return None;
                }
                match self.random.below(3) {
                    0 if self.is_request => {
                        self.is_answer_lost.store(true, Ordering::Relaxed);
                        None
                    }
                    1 if !is_lost => Some(count / 2),
                    _ => Some(0),
                }
            }
        }
    }
}
