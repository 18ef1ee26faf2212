//! The listening sockets of a process, as a stranger on its host finds them.

use std::{fs, io::Result, net::SocketAddr};

use socket2::{Domain, SockAddr, Socket, Type};

/// A TCP port, taken as one on loopback, or a Unix socket with an abstract name.
#[derive(Debug, Clone)]
pub struct Listener {
    address: SockAddr,
    kind: Type,
}

impl Listener {
    /// Returns whether it is a Unix socket.
    pub fn is_unix(&self) -> bool {
        self.address.domain() == Domain::UNIX
    }

    /// Returns the TCP port; `None` for a Unix socket.
    pub fn port(&self) -> Option<u16> {
        self.address.as_socket().map(|address| address.port())
    }

    /// Connects and says nothing. The connection ends when it is dropped.
    ///
    /// # Errors
    /// The listener does not accept.
    pub fn connect(&self) -> Result<Socket> {
        let socket = Socket::new(self.address.domain(), self.kind, None)?;
        socket.connect(&self.address)?;
        Ok(socket)
    }
}

/// Returns the listeners of a process.
///
/// # Errors
/// The process is gone.
pub fn listeners(process: u32) -> Result<Vec<Listener>> {
    let mut own = Vec::new();
    for entry in fs::read_dir(format!("/proc/{process}/fd"))? {
        let Ok(target) = fs::read_link(entry?.path()) else { continue };
        let inode = target.to_str().and_then(|text| text.strip_prefix("socket:["));
        own.extend(inode.map(|inode| inode.trim_end_matches(']').to_owned()));
    }
    let tcp = fs::read_to_string(format!("/proc/{process}/net/tcp"))?;
    let unix = fs::read_to_string(format!("/proc/{process}/net/unix"))?;
    let mut found = Vec::new();
    for line in tcp.lines().skip(1) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, local, _, "0A", _, _, _, _, _, inode, ..] = words[..] else { continue };
        let port = local.rsplit_once(':').and_then(|(_, port)| u16::from_str_radix(port, 16).ok());
        if let Some(port) = port
            && own.iter().any(|own| own == inode)
        {
            let address = SocketAddr::from(([127, 0, 0, 1], port)).into();
            found.push(Listener { address, kind: Type::STREAM });
        }
    }
    for line in unix.lines().skip(1) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, _, _, "00010000", kind, _, inode, path] = words[..] else { continue };
        if let Some(name) = path.strip_prefix('@')
            && own.iter().any(|own| own == inode)
        {
            let kind = if kind == "0005" { Type::SEQPACKET } else { Type::STREAM };
            found.push(Listener { address: SockAddr::unix(format!("\0{name}"))?, kind });
        }
    }
    Ok(found)
}
