//! A blocking HTTP client for metadata servers, with deadlines.

use std::{io, time::Duration};

use mooncake_base::{
    Clock, Error, ErrorCode, Moment, Result, SystemClock, token::METADATA_OWNER_HEADER,
};
use ureq::{Agent, http::Uri};

/// Maximum length of a quoted error page.
const QUOTE_CHARS_MAX: usize = 200;

/// An HTTP request without its URL.
#[derive(Debug, Clone, Copy)]
pub(super) enum Request<'a> {
    Get,
    Put(&'a [u8]),
    Post(&'a [u8]),
    Delete,
}

/// The answer of the server, with any status.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) body: Vec<u8>,
}

/// An HTTP client for small bodies.
#[derive(Debug)]
pub(super) struct HttpClient {
    agent: Agent,
    bytes_max: u64,
}

impl HttpClient {
    /// Creates a client that reads bodies up to a limit.
    pub(super) fn new(connect_timeout: Duration, bytes_max: u64) -> Self {
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(connect_timeout))
            // Metadata servers belong to the cluster; a proxy from the environment cannot reach
            // them.
            .proxy(None)
            .build()
            .new_agent();
        Self { agent, bytes_max }
    }

    /// Creates a client over another connector.
    #[cfg(test)]
    pub(super) const fn over(agent: Agent, bytes_max: u64) -> Self {
        Self { agent, bytes_max }
    }

    /// Sends a request.
    ///
    /// # Errors
    /// The server cannot be reached, or does not answer before the deadline.
    pub(super) fn call(&self, request: Request<'_>, url: &str, deadline: Moment) -> Result<Answer> {
        self.call_as_owner(request, url, "", deadline)
    }

    /// Sends a request as the owner of an entry; with an empty text like [`call`](Self::call).
    ///
    /// # Errors
    /// The server cannot be reached, or does not answer before the deadline.
    pub(super) fn call_as_owner(
        &self,
        request: Request<'_>,
        url: &str,
        owner: &str,
        deadline: Moment,
    ) -> Result<Answer> {
        let failed = |failure| unreachable(failure, url);
        let left = Some(deadline.left(SystemClock.now()).max(Duration::from_millis(1)));
        let agent = &self.agent;
        let sent = match request {
            Request::Get => agent.get(url).config().timeout_global(left).build().call(),
            Request::Delete => {
                let mut delete = agent.delete(url).config().timeout_global(left).build();
                if !owner.is_empty() {
                    delete = delete.header(METADATA_OWNER_HEADER, owner);
                }
                delete.call()
            }
            Request::Put(body) => {
                let mut put = agent.put(url).config().timeout_global(left).build();
                if !owner.is_empty() {
                    put = put.header(METADATA_OWNER_HEADER, owner);
                }
                put.send(body)
            }
            Request::Post(body) => agent
                .post(url)
                .content_type("application/json")
                .config()
                .timeout_global(left)
                .build()
                .send(body),
        };
        let mut response = sent.map_err(failed)?;
        let status = response.status().as_u16();
        let body = response.body_mut().with_config().limit(self.bytes_max);
        let body = body.read_to_vec().map_err(failed)?;
        Ok(Answer { status, body })
    }
}

impl Answer {
    /// The beginning of the body, for error messages.
    pub(super) fn quoted(&self) -> String {
        String::from_utf8_lossy(&self.body).trim().chars().take(QUOTE_CHARS_MAX).collect()
    }
}

/// Returns whether the text is a URL with a host.
pub(super) fn has_host(url: &str) -> bool {
    url.parse::<Uri>()
        .is_ok_and(|uri| uri.authority().is_some_and(|authority| !authority.host().is_empty()))
}

fn unreachable(failure: ureq::Error, url: &str) -> Error {
    let is_late = match &failure {
        ureq::Error::Timeout(_) => true,
        ureq::Error::Io(source) => source.kind() == io::ErrorKind::TimedOut,
        _ => false,
    };
    let (code, text) = if is_late {
        (ErrorCode::RPC_TIMEOUT, "the metadata server did not answer in time")
    } else {
        let text = "the metadata server cannot be reached; start one, as mooncake_master does with \
            --enable_http_metadata_server, or use P2PHANDSHAKE as the metadata server, which needs none";
        (ErrorCode::RPC_FAIL, text)
    };
    // The key in the query would not help the reader of the error.
    let url = url.split_once('?').map_or(url, |(url, _)| url);
    Error::new(code, text).with("url", url).with_remedy(super::REMEDY).caused_by(failure)
}
