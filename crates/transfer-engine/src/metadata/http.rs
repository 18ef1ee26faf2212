//! Descriptors on the established HTTP metadata server: two keys per segment.

use std::{io, time::Duration};

use mooncake_base::sync::Mutex;
use mooncake_base::{Clock, Endpoint, Error, ErrorCode, Moment, Result, SystemClock};
use serde::{Deserialize, Serialize};
use ureq::{Agent, http::Uri};

use super::{MetadataSettings, MetadataStore};
use crate::descriptor::{DESCRIPTOR_BYTES_MAX, SegmentDescriptor};

/// The most of an error page that is quoted.
const QUOTE_CHARS_MAX: usize = 200;

/// A metadata server.
#[derive(Debug)]
pub struct HttpStore {
    url: String,
    settings: MetadataSettings,
    agent: Agent,
    published: Mutex<Option<Published>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Published {
    name: String,
    rpc: Endpoint,
}

/// What lies under the key of a segment's handshake socket.
#[derive(Debug, Serialize, Deserialize)]
struct RpcMeta {
    ip_or_host_name: String,
    rpc_port: u16,
}

/// One exchange with the server.
struct Answer {
    status: u16,
    body: Vec<u8>,
}

enum Request<'a> {
    Get,
    Put(&'a [u8]),
    Delete,
}

impl HttpStore {
    /// A store at that URL; connects to nothing yet.
    ///
    /// # Errors
    /// The text is no URL with a host.
    pub fn new(url: &str, settings: MetadataSettings) -> Result<Self> {
        let has_host = url
            .parse::<Uri>()
            .is_ok_and(|uri| uri.authority().is_some_and(|authority| !authority.host().is_empty()));
        if !has_host || url.contains(['?', '#']) {
            return Err(Error::invalid("not the URL of a metadata server").with("address", url));
        }
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(settings.connect_timeout))
            // Descriptors are of this cluster; a proxy from the environment does not know it.
            .proxy(None)
            .build()
            .new_agent();
        Ok(Self { url: url.to_owned(), settings, agent, published: Mutex::default() })
    }

    fn rpc_key(&self, name: &str) -> String {
        format!("mooncake/{}rpc_meta/{name}", self.prefix())
    }

    fn descriptor_key(&self, name: &str) -> String {
        // The established rule: a name with a slash brings its own folder.
        let folder = if name.contains('/') { "" } else { "ram/" };
        format!("mooncake/{}{folder}{name}", self.prefix())
    }

    fn prefix(&self) -> String {
        let prefix = self.settings.prefix.trim_matches('/');
        if prefix.is_empty() { String::new() } else { format!("{prefix}/") }
    }

    fn get(&self, key: &str, name: &str, deadline: Moment) -> Result<Vec<u8>> {
        let answer = self.exchange(&Request::Get, key, deadline)?;
        match answer.status {
            200 => Ok(answer.body),
            404 => Err(Error::new(
                ErrorCode::SEGMENT_NOT_FOUND,
                "the metadata server knows no segment of that name",
            )
            .with("segment", name)
            .with("url", &self.url)),
            _ => Err(self.refusal(&answer, key)),
        }
    }

    fn exchange(&self, request: &Request<'_>, key: &str, deadline: Moment) -> Result<Answer> {
        let left = deadline.left(SystemClock.now()).max(Duration::from_millis(1));
        let url = format!("{}?key={}", self.url, percent_encoded(key));
        let sent = match request {
            Request::Get => self.agent.get(&url).config().timeout_global(Some(left)).build().call(),
            Request::Put(body) => {
                self.agent.put(&url).config().timeout_global(Some(left)).build().send(*body)
            }
            Request::Delete => {
                self.agent.delete(&url).config().timeout_global(Some(left)).build().call()
            }
        };
        let mut response = sent.map_err(|failure| self.unreachable(failure))?;
        let status = response.status().as_u16();
        let body = response.body_mut().with_config().limit(DESCRIPTOR_BYTES_MAX as u64);
        let body = body.read_to_vec().map_err(|failure| self.unreachable(failure))?;
        Ok(Answer { status, body })
    }

    fn unreachable(&self, failure: ureq::Error) -> Error {
        let (code, text) = match &failure {
            ureq::Error::Timeout(_) => {
                (ErrorCode::RPC_TIMEOUT, "the metadata server did not answer in time")
            }
            ureq::Error::Io(source) if source.kind() == io::ErrorKind::TimedOut => {
                (ErrorCode::RPC_TIMEOUT, "the metadata server did not answer in time")
            }
            _ => (ErrorCode::RPC_FAIL, "the metadata server cannot be reached"),
        };
        Error::new(code, text).with("url", &self.url).caused_by(failure)
    }

    fn refusal(&self, answer: &Answer, key: &str) -> Error {
        Error::new(ErrorCode::RPC_FAIL, "the metadata server refused")
            .with("url", &self.url)
            .with("key", key)
            .with("status", answer.status)
            .with("answer", quoted(&answer.body))
    }

    fn put_rpc(&self, own: &Published, deadline: Moment) -> Result<()> {
        let meta =
            RpcMeta { ip_or_host_name: own.rpc.host.clone(), rpc_port: own.rpc.port.unwrap_or(0) };
        let body = serde_json::to_vec(&meta).expect("a string and a number are always JSON");
        let key = self.rpc_key(&own.name);
        let answer = self.exchange(&Request::Put(&body), &key, deadline)?;
        match answer.status {
            200..300 => Ok(()),
            // The one reason for which a complete request is refused.
            400 => Err(Error::new(
                ErrorCode::SEGMENT_ALREADY_EXISTS,
                "another engine is published under this name; give this one a local_hostname of \
                 its own, or stop the other one, or delete its entry if it is dead",
            )
            .with("name", &own.name)
            .with("url", &self.url)
            .with("key", key)
            .with("answer", quoted(&answer.body))),
            _ => Err(self.refusal(&answer, &key)),
        }
    }

    fn delete(&self, key: &str, deadline: Moment) -> Result<()> {
        let answer = self.exchange(&Request::Delete, key, deadline)?;
        match answer.status {
            200..300 | 404 => Ok(()),
            _ => Err(self.refusal(&answer, key)),
        }
    }
}

impl MetadataStore for HttpStore {
    fn publish(&self, own: &SegmentDescriptor, rpc: &Endpoint, deadline: Moment) -> Result<()> {
        let entry = Published { name: own.name.clone(), rpc: rpc.clone() };
        let is_new = self.published.lock().as_ref() != Some(&entry);
        if is_new {
            // A name or an address that changed: the old entry would be refused as a duplicate.
            self.withdraw(deadline)?;
            self.put_rpc(&entry, deadline)?;
        }
        *self.published.lock() = Some(entry);
        let key = self.descriptor_key(&own.name);
        let answer = self.exchange(&Request::Put(&own.to_json()), &key, deadline);
        let failure = match answer {
            Ok(Answer { status: 200..300, .. }) => return Ok(()),
            Ok(answer) => self.refusal(&answer, &key),
            Err(failure) => failure,
        };
        if is_new {
            // Half an entry would keep the name taken. If this fails too, the first failure says
            // more.
            let _ = self.withdraw(deadline);
        }
        Err(failure)
    }

    fn resolve(&self, name: &str, deadline: Moment) -> Result<SegmentDescriptor> {
        let text = self.get(&self.descriptor_key(name), name, deadline)?;
        SegmentDescriptor::from_json(&text)
            .map_err(|error| error.with("segment", name).with("url", &self.url))
    }

    fn locate(&self, name: &str, deadline: Moment) -> Result<Endpoint> {
        let text = self.get(&self.rpc_key(name), name, deadline)?;
        let meta: RpcMeta = serde_json::from_slice(&text).map_err(|source| {
            Error::new(ErrorCode::TRANSFER_FAIL, "the entry of the segment cannot be read")
                .with("segment", name)
                .with("url", &self.url)
                .caused_by(source)
        })?;
        let host = meta.ip_or_host_name.trim_matches(['[', ']']);
        Ok(Endpoint::new(host, meta.rpc_port))
    }

    fn withdraw(&self, deadline: Moment) -> Result<()> {
        let Some(entry) = self.published.lock().clone() else { return Ok(()) };
        self.delete(&self.descriptor_key(&entry.name), deadline)?;
        self.delete(&self.rpc_key(&entry.name), deadline)?;
        *self.published.lock() = None;
        Ok(())
    }
}

fn percent_encoded(key: &str) -> String {
    let mut encoded = String::with_capacity(key.len() + 16);
    for byte in key.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

fn quoted(body: &[u8]) -> String {
    String::from_utf8_lossy(body).trim().chars().take(QUOTE_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests;
