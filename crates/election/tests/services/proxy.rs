//! A TCP proxy that can be cut: established and new connections stay open, but no byte passes.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use mooncake_base::sync::{Condvar, Mutex};

/// The proxy of one server. Its threads end with the connections.
pub(crate) struct Proxy {
    port: u16,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    is_cut: Mutex<bool>,
    changed: Condvar,
    is_closed: AtomicBool,
    sockets: Mutex<Vec<TcpStream>>,
}

impl Proxy {
    pub(crate) fn start(server_port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::<State>::default();
        let accepting = Arc::clone(&state);
        thread::spawn(move || {
            for client in listener.incoming() {
                if accepting.is_closed.load(Ordering::Acquire) {
                    return;
                }
                accepting.connect(client.unwrap(), server_port);
            }
        });
        Self { port, state }
    }

    pub(crate) const fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn cut(&self) {
        *self.state.is_cut.lock() = true;
    }

    pub(crate) fn heal(&self) {
        *self.state.is_cut.lock() = false;
        self.state.changed.notify_all();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.state.is_closed.store(true, Ordering::Release);
        self.heal();
        for socket in self.state.sockets.lock().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
        // Wakes the accepting thread.
        drop(TcpStream::connect(("127.0.0.1", self.port)));
    }
}

impl State {
    fn connect(self: &Arc<Self>, client: TcpStream, server_port: u16) {
        let Ok(server) = TcpStream::connect(("127.0.0.1", server_port)) else { return };
        let ways = [
            (client.try_clone().unwrap(), server.try_clone().unwrap()),
            (server.try_clone().unwrap(), client.try_clone().unwrap()),
        ];
        self.sockets.lock().extend([client, server]);
        for (from, to) in ways {
            let state = Arc::clone(self);
            thread::spawn(move || {
                // A connection that breaks at one end breaks at the other.
                let _ = state.pass(&from, &to);
                let _ = from.shutdown(Shutdown::Both);
                let _ = to.shutdown(Shutdown::Both);
            });
        }
    }

    fn pass(&self, mut from: &TcpStream, mut to: &TcpStream) -> io::Result<()> {
        let mut part = [0; 4096];
        loop {
            let count = from.read(&mut part)?;
            if count == 0 {
                return Ok(());
            }
            let mut is_cut = self.is_cut.lock();
            while *is_cut {
                self.changed.wait_for(&mut is_cut, std::time::Duration::from_secs(1));
            }
            drop(is_cut);
            to.write_all(&part[..count])?;
        }
    }
}
