//! Segments as entries on a key-value server: the keys, and the ownership of names.
//!
//! Like in upstream, a segment has two entries: the address of its handshake socket, and its
//! descriptor. The first entry is also the claim to the name: the engine that wrote it holds the
//! name until the entry is removed.

use std::{fmt, time::Duration};

use mooncake_base::sync::Mutex;
use mooncake_base::{Clock, Endpoint, Error, ErrorCode, Moment, Result, SystemClock};
use serde::{Deserialize, Serialize};

use super::MetadataStore;
use crate::discovery::{descriptor::SegmentDescriptor, handshake};

/// Timeout for checking that the holder of a name is alive.
const HOLDER_TIMEOUT: Duration = Duration::from_secs(1);

/// The entry that holds a name, with its value while this engine holds it.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeyClaim<'a> {
    pub(super) key: &'a str,
    pub(super) value: &'a [u8],
}

/// A key-value server. Calls block, up to their deadline; errors name the server.
pub(super) trait KeyValueServer: fmt::Debug + Send + Sync {
    /// Address of the server for messages, without secrets.
    fn address(&self) -> &str;

    /// Returns the value of a key.
    fn get(&self, key: &str, deadline: Moment) -> Result<Option<Vec<u8>>>;

    /// Creates the entry of a claim unless it exists. An existing entry with the value `expected`
    /// is replaced. Returns the value of the entry that is in the way.
    fn claim(
        &self,
        claim: KeyClaim<'_>,
        expected: Option<&[u8]>,
        deadline: Moment,
    ) -> Result<Option<Vec<u8>>>;

    /// Writes another entry while the claim is held. Returns whether it is held, as far as the
    /// server can tell.
    fn put(&self, claim: KeyClaim<'_>, key: &str, value: &[u8], deadline: Moment) -> Result<bool>;

    /// Removes the entry of the claim and another one, unless another engine holds the claim, as
    /// far as the server can tell.
    fn release(&self, claim: KeyClaim<'_>, key: &str, deadline: Moment) -> Result<()>;
}

/// The entry of a segment's handshake socket.
#[derive(Debug, Serialize, Deserialize)]
struct RpcMeta {
    ip_or_host_name: String,
    rpc_port: u16,
}

/// A metadata store on a key-value server.
#[derive(Debug)]
pub(super) struct KeyedStore<S> {
    server: S,
    /// Prefix of every key.
    prefix: String,
    published: Mutex<Option<Published>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Published {
    name: String,
    rpc: Endpoint,
}

impl<S: KeyValueServer> KeyedStore<S> {
    /// Creates a store with keys under `mooncake/<cluster>/`, or under `mooncake/` without a
    /// cluster name.
    pub(super) fn new(server: S, cluster: &str) -> Self {
        let prefix = match cluster.trim_matches('/') {
            "" => "mooncake/".to_owned(),
            cluster => format!("mooncake/{cluster}/"),
        };
        Self { server, prefix, published: Mutex::default() }
    }

    fn rpc_key(&self, name: &str) -> String {
        format!("{}rpc_meta/{name}", self.prefix)
    }

    fn descriptor_key(&self, name: &str) -> String {
        // Upstream's rule: a name with a slash contains its own folder.
        let folder = if name.contains('/') { "" } else { "ram/" };
        format!("{}{folder}{name}", self.prefix)
    }

    fn get(&self, key: &str, name: &str, deadline: Moment) -> Result<Vec<u8>> {
        self.server.get(key, deadline)?.ok_or_else(|| {
            let text = "the metadata server has no segment of this name";
            Error::new(ErrorCode::SEGMENT_NOT_FOUND, text)
                .with("segment", name)
                .with("url", self.server.address())
        })
    }

    /// Claims the name for this engine.
    fn claim(&self, own: &Published, deadline: Moment) -> Result<()> {
        let (key, value) = (self.rpc_key(&own.name), own.entry());
        let claim = KeyClaim { key: &key, value: &value };
        let Some(mut holder) = self.server.claim(claim, None, deadline)? else { return Ok(()) };
        if holder == value {
            return Ok(());
        }
        if !is_alive(&holder, deadline) {
            match self.server.claim(claim, Some(&holder), deadline)? {
                None => {
                    tracing::info!(name = own.name, "took over the name of a dead engine");
                    return Ok(());
                }
                Some(other) => holder = other,
            }
        }
        Err(self.taken(own, &key, &holder))
    }

    fn taken(&self, own: &Published, key: &str, holder: &[u8]) -> Error {
        let holder = read_rpc(holder).map_or_else(|_| "unreadable".to_owned(), |at| at.to_string());
        Error::new(
            ErrorCode::SEGMENT_ALREADY_EXISTS,
            "another engine is published under this name, and it answers; give this one a \
             local_hostname of its own, or stop the other one",
        )
        .with("name", &own.name)
        .with("url", self.server.address())
        .with("key", key)
        .with("held_by", holder)
    }

    /// Writes the descriptor; returns whether this engine still holds the name.
    fn put(&self, own: &Published, descriptor: &[u8], deadline: Moment) -> Result<bool> {
        let (rpc_key, value) = (self.rpc_key(&own.name), own.entry());
        let claim = KeyClaim { key: &rpc_key, value: &value };
        self.server.put(claim, &self.descriptor_key(&own.name), descriptor, deadline)
    }
}

impl<S: KeyValueServer> MetadataStore for KeyedStore<S> {
    fn publish(&self, own: &SegmentDescriptor, rpc: &Endpoint, deadline: Moment) -> Result<()> {
        let entry = Published { name: own.name.clone(), rpc: rpc.clone() };
        let is_new = self.published.lock().as_ref() != Some(&entry);
        if is_new {
            // The name or the address has changed, so the old entry would be refused as a
            // duplicate.
            self.withdraw(deadline)?;
            self.claim(&entry, deadline)?;
            *self.published.lock() = Some(entry.clone());
        }
        let descriptor = own.to_json();
        let put = || {
            if self.put(&entry, &descriptor, deadline)? {
                return Ok(());
            }
            // The server has lost the entry, or another engine holds it.
            self.claim(&entry, deadline)?;
            if self.put(&entry, &descriptor, deadline)? {
                return Ok(());
            }
            Err(self.taken(&entry, &self.rpc_key(&entry.name), b""))
        };
        let done = put();
        if done.is_err() && is_new {
            // A half-published segment would keep the name taken. If this fails as well, the first
            // failure is more useful.
            let _ = self.withdraw(deadline);
        }
        done
    }

    fn resolve(&self, name: &str, deadline: Moment) -> Result<SegmentDescriptor> {
        let text = self.get(&self.descriptor_key(name), name, deadline)?;
        SegmentDescriptor::from_json(&text)
            .map_err(|error| error.with("segment", name).with("url", self.server.address()))
    }

    fn locate(&self, name: &str, deadline: Moment) -> Result<Endpoint> {
        let text = self.get(&self.rpc_key(name), name, deadline)?;
        read_rpc(&text)
            .map_err(|error| error.with("segment", name).with("url", self.server.address()))
    }

    fn withdraw(&self, deadline: Moment) -> Result<()> {
        let Some(entry) = self.published.lock().clone() else { return Ok(()) };
        let (key, value) = (self.rpc_key(&entry.name), entry.entry());
        let claim = KeyClaim { key: &key, value: &value };
        self.server.release(claim, &self.descriptor_key(&entry.name), deadline)?;
        *self.published.lock() = None;
        Ok(())
    }
}

impl Published {
    /// The entry of the handshake socket in upstream's form.
    fn entry(&self) -> Vec<u8> {
        let rpc_port = self.rpc.port.unwrap_or(0);
        let meta = RpcMeta { ip_or_host_name: self.rpc.host.clone(), rpc_port };
        serde_json::to_vec(&meta).expect("a string and a number are always JSON")
    }
}

fn read_rpc(text: &[u8]) -> Result<Endpoint> {
    let meta: RpcMeta = serde_json::from_slice(text).map_err(|source| {
        Error::new(ErrorCode::TRANSFER_FAIL, "the entry of the segment cannot be read")
            .caused_by(source)
    })?;
    Ok(Endpoint::new(meta.ip_or_host_name.trim_matches(['[', ']']), meta.rpc_port))
}

/// Returns whether the engine in an entry answers a probe.
fn is_alive(entry: &[u8], deadline: Moment) -> bool {
    let soon = deadline.min(SystemClock.now() + HOLDER_TIMEOUT);
    read_rpc(entry).is_ok_and(|at| handshake::probe(&at, soon).is_ok())
}

#[cfg(test)]
mod tests;

/// Fuzz target: the entry of a handshake socket.
#[cfg(test)]
pub(super) fn fuzz_target() -> mooncake_base::fuzz::Target {
    let run = |bytes: &[u8]| match read_rpc(bytes) {
        Err(_) => 0,
        Ok(at) => {
            let again = Published { name: String::new(), rpc: at.clone() }.entry();
            assert_eq!(read_rpc(&again).expect("we wrote it"), at);
            mooncake_base::fuzz::outcome((at.host.is_empty(), at.port))
        }
    };
    let seeds = vec![
        br#"{"ip_or_host_name":"10.0.0.1","rpc_port":15001}"#.to_vec(),
        br#"{"ip_or_host_name":"[::1]","rpc_port":0}"#.to_vec(),
    ];
    mooncake_base::fuzz::Target { name: "rpc_meta", seeds, run }
}
