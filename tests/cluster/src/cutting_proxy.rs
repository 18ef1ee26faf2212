//! A TCP proxy that cuts connections at random: before a request is delivered, after it is delivered
//! and before its answer, and in the middle of a frame.

use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
};

use mooncake_testkit::Random;

/// One of this many pieces that a peer sends is followed by a cut.
const PIECES_PER_CUT: u64 = 100;

/// The pieces at the start of each direction that are not cut: the greeting.
const GREETING_PIECES: u64 = 1;

/// A running proxy. Dropping it closes its listener; open connections end with their peers.
#[derive(Debug)]
pub struct CuttingProxy {
    address: SocketAddr,
    state: Arc<State>,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct State {
    is_over: AtomicBool,
    cuts: AtomicU64,
}

/// A connection through the proxy, as seen by one of its directions.
struct Direction {
    from: TcpStream,
    to: TcpStream,
    /// Whether requests pass here, and not answers.
    is_request: bool,
    /// Set once a request was delivered whose answer must not arrive.
    is_answer_lost: Arc<AtomicBool>,
    random: Random,
    state: Arc<State>,
}

impl CuttingProxy {
    /// Starts a proxy for the server on a free port. The seed decides where it cuts.
    ///
    /// # Panics
    /// If there is no free port.
    pub fn start(server: &str, seed: u64) -> Self {
        let server: SocketAddr = server.parse().expect("an address with a port");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("a bound socket has an address");
        let state = Arc::<State>::default();
        let shared = Arc::clone(&state);
        let acceptor = std::thread::spawn(move || {
            let mut random = Random::from_seed(seed);
            while let Ok((client, _)) = listener.accept() {
                if shared.is_over.load(Ordering::SeqCst) {
                    return;
                }
                if let Ok(server) = TcpStream::connect(server) {
                    forward(&client, &server, &mut random, &shared);
                }
            }
        });
        Self { address, state, acceptor: Some(acceptor) }
    }

    /// Returns the address that clients connect to.
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// Returns the number of connections that were cut.
    pub fn cuts(&self) -> u64 {
        self.state.cuts.load(Ordering::SeqCst)
    }
}

impl Drop for CuttingProxy {
    fn drop(&mut self) {
        self.state.is_over.store(true, Ordering::SeqCst);
        // Wakes the accepting thread.
        let _ = TcpStream::connect(self.address);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

/// Starts a thread per direction. They end when either peer or a cut ends the connection.
fn forward(client: &TcpStream, server: &TcpStream, random: &mut Random, state: &Arc<State>) {
    let is_answer_lost = Arc::<AtomicBool>::default();
    for (from, to, is_request) in [(client, server, true), (server, client, false)] {
        let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) else { return };
        let _ = to.set_nodelay(true);
        let direction = Direction {
            from,
            to,
            is_request,
            is_answer_lost: Arc::clone(&is_answer_lost),
            random: Random::from_seed(random.number()),
            state: Arc::clone(state),
        };
        std::thread::spawn(move || direction.run());
    }
}

impl Direction {
    fn run(mut self) {
        let mut piece = vec![0; 64 << 10];
        let mut pieces = 0;
        while let Ok(count @ 1..) = self.from.read(&mut piece) {
            pieces += 1;
            if !self.pass(&piece[..count], pieces > GREETING_PIECES) {
                break;
            }
        }
        let _ = self.from.shutdown(Shutdown::Both);
        let _ = self.to.shutdown(Shutdown::Both);
    }

    /// Passes a piece on, or cuts the connection. Returns whether the connection is still open.
    fn pass(&mut self, piece: &[u8], may_cut: bool) -> bool {
        let is_lost = !self.is_request && self.is_answer_lost.load(Ordering::SeqCst);
        let is_cut = may_cut && self.random.below(PIECES_PER_CUT) == 0;
        if !is_lost && !is_cut {
            return self.to.write_all(piece).is_ok();
        }
        match self.random.below(3) {
            0 if self.is_request => {
                self.is_answer_lost.store(true, Ordering::SeqCst);
                return self.to.write_all(piece).is_ok();
            }
            // The peer may be gone, which is a cut, too.
            1 if !is_lost => drop(self.to.write_all(&piece[..piece.len() / 2])),
            _ => {}
        }
        self.state.cuts.fetch_add(1, Ordering::SeqCst);
        false
    }
}
