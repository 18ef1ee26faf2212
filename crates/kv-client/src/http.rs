//! A blocking HTTP client for small bodies, with deadlines.

use std::{
    io::{self, Read},
    sync::Arc,
    time::Duration,
};

use mooncake_base::{Clock, Error, ErrorCode, Moment, Result, SystemClock};
use ureq::{
    Agent, Body,
    http::{Request as HttpRequest, Response, Uri, request::Builder},
    tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem},
};

use crate::ErrorTexts;

/// Maximum length of a quoted error page.
const QUOTE_CHARS_MAX: usize = 200;

/// An HTTP request without its URL.
#[derive(Debug, Clone, Copy)]
pub enum Request<'a> {
    /// Asks for a document.
    Get,
    /// Replaces a document.
    Put(&'a [u8]),
    /// Sends a document.
    Post(&'a [u8]),
    /// Changes a part of a document.
    Patch(&'a [u8]),
    /// Removes a document.
    Delete,
}

/// Names and values of headers.
pub type Headers<'a> = &'a [(&'static str, &'a str)];

/// The header of a body in JSON.
pub const JSON: (&str, &str) = ("content-type", "application/json");

/// The answer of the server, with any status.
#[derive(Debug)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// The body.
    pub body: Vec<u8>,
}

/// An HTTP client for small bodies. Each call that runs has a connection of its own, so that none
/// waits for another.
#[derive(Debug)]
pub struct HttpClient {
    agent: Agent,
    bytes_max: u64,
    texts: &'static ErrorTexts,
}

/// An answer that is read line by line while the server sends it.
pub struct Lines {
    reader: Box<dyn Read + Send>,
    /// Received bytes of which no whole line was returned yet.
    buffer: Vec<u8>,
    bytes_max: u64,
    url: String,
    texts: &'static ErrorTexts,
}

impl HttpClient {
    /// Creates a client that reads bodies and lines up to a limit.
    pub fn new(connect_timeout: Duration, bytes_max: u64, texts: &'static ErrorTexts) -> Self {
        // Without a certificate to trust, an `https` URL, as in a redirection, is an error.
        Self::trusting(Vec::new(), connect_timeout, bytes_max, texts)
    }

    /// Creates a client that trusts the certificates of a PEM file, and no others, for `https` URLs.
    ///
    /// # Errors
    /// The text holds no certificate.
    pub fn with_root_certificates(
        connect_timeout: Duration,
        bytes_max: u64,
        texts: &'static ErrorTexts,
        pem: &[u8],
    ) -> Result<Self> {
        let bad = || Error::invalid("the file of root certificates holds none in PEM form");
        let certificates = parse_pem(pem)
            .filter_map(|item| match item {
                Ok(PemItem::Certificate(certificate)) => Some(Ok(certificate)),
                Ok(_) => None,
                Err(error) => Some(Err(bad().caused_by(error))),
            })
            .collect::<Result<Vec<Certificate<'static>>>>()?;
        if certificates.is_empty() {
            return Err(bad());
        }
        Ok(Self::trusting(certificates, connect_timeout, bytes_max, texts))
    }

    /// Creates a client over an agent, which has its own connector and settings.
    pub const fn over(agent: Agent, bytes_max: u64, texts: &'static ErrorTexts) -> Self {
        Self { agent, bytes_max, texts }
    }

    fn trusting(
        certificates: Vec<Certificate<'static>>,
        connect_timeout: Duration,
        bytes_max: u64,
        texts: &'static ErrorTexts,
    ) -> Self {
        let tls = TlsConfig::builder()
            .root_certs(RootCerts::Specific(Arc::new(certificates)))
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .build();
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(connect_timeout))
            // The servers belong to the cluster; a proxy from the environment cannot reach them.
            .proxy(None)
            .tls_config(tls)
            .build()
            .new_agent();
        Self::over(agent, bytes_max, texts)
    }

    /// Sends a request.
    ///
    /// # Errors
    /// The server cannot be reached, or does not answer before the deadline.
    pub fn call(
        &self,
        request: Request<'_>,
        url: &str,
        headers: Headers<'_>,
        deadline: Moment,
    ) -> Result<Answer> {
        let mut response = self.send(request, url, headers, deadline)?;
        let status = response.status().as_u16();
        let body = response.body_mut().with_config().limit(self.bytes_max);
        let body = body.read_to_vec().map_err(|failure| self.unreachable(failure, url))?;
        Ok(Answer { status, body })
    }

    /// Sends a request whose answer is read while the server sends it. The answer has status 200.
    ///
    /// # Errors
    /// Those of [`call`](Self::call), or the server answered with another status.
    pub fn stream(
        &self,
        request: Request<'_>,
        url: &str,
        headers: Headers<'_>,
        deadline: Moment,
    ) -> Result<Lines> {
        let mut response = self.send(request, url, headers, deadline)?;
        let status = response.status().as_u16();
        if status != 200 {
            let body = response.body_mut().with_config().limit(self.bytes_max);
            let body = body.read_to_vec().map_err(|failure| self.unreachable(failure, url))?;
            return Err(self.refusal(&Answer { status, body }, url));
        }
        Ok(Lines {
            reader: Box::new(response.into_body().into_reader()),
            buffer: Vec::new(),
            bytes_max: self.bytes_max,
            url: url.to_owned(),
            texts: self.texts,
        })
    }

    /// Ends the calls that run, and refuses later ones.
    pub fn close(&self) {
        self.agent.clone().shutdown();
    }

    /// The error of an answer with an unexpected status.
    pub fn refusal(&self, answer: &Answer, url: &str) -> Error {
        Error::new(ErrorCode::RPC_FAIL, self.texts.refused)
            .with("url", without_query(url))
            .with("status", answer.status)
            .with("answer", answer.quoted())
    }

    fn send(
        &self,
        request: Request<'_>,
        url: &str,
        headers: Headers<'_>,
        deadline: Moment,
    ) -> Result<Response<Body>> {
        let left = deadline.left(SystemClock.now()).max(Duration::from_millis(1));
        let build = |method: &str| -> Builder {
            headers
                .iter()
                .fold(HttpRequest::builder().method(method).uri(url), |builder, (name, value)| {
                    builder.header(*name, *value)
                })
        };
        let sent = match request {
            Request::Get => self.run(build("GET").body(()), left),
            Request::Delete => self.run(build("DELETE").body(()), left),
            Request::Put(body) => self.run(build("PUT").body(body), left),
            Request::Post(body) => self.run(build("POST").body(body), left),
            Request::Patch(body) => self.run(build("PATCH").body(body), left),
        };
        sent.map_err(|failure| self.unreachable(failure, url))
    }

    fn run<S: ureq::AsSendBody>(
        &self,
        request: std::result::Result<HttpRequest<S>, ureq::http::Error>,
        left: Duration,
    ) -> std::result::Result<Response<Body>, ureq::Error> {
        let request = self.agent.configure_request(request?).timeout_global(Some(left)).build();
        self.agent.run(request)
    }

    fn unreachable(&self, failure: ureq::Error, url: &str) -> Error {
        let is_late = match &failure {
            ureq::Error::Timeout(_) => true,
            ureq::Error::Io(source) => source.kind() == io::ErrorKind::TimedOut,
            _ => false,
        };
        let error = if is_late {
            self.texts.late()
        } else {
            Error::new(ErrorCode::RPC_FAIL, self.texts.unreachable)
        };
        self.texts.with_remedy(error.with("url", without_query(url)).caused_by(failure))
    }
}

impl Lines {
    /// Returns the next line without its end; `None` after the last one. An incomplete last line is
    /// dropped.
    ///
    /// # Errors
    /// The deadline of the request passed, the connection broke, or the line is too long.
    pub fn next_line(&mut self) -> Result<Option<Vec<u8>>> {
        let mut part = [0; 4096];
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let mut line: Vec<u8> = self.buffer.drain(..=end).collect();
                line.pop();
                return Ok(Some(line));
            }
            if self.buffer.len() as u64 > self.bytes_max {
                return Err(self.broken(io::ErrorKind::InvalidData.into()));
            }
            match self.reader.read(&mut part) {
                Ok(0) => return Ok(None),
                Ok(count) => self.buffer.extend_from_slice(&part[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.broken(error)),
            }
        }
    }

    fn broken(&self, source: io::Error) -> Error {
        let is_late = source.kind() == io::ErrorKind::TimedOut
            || source
                .get_ref()
                .is_some_and(|inner| matches!(inner.downcast_ref(), Some(ureq::Error::Timeout(_))));
        let error = if is_late {
            self.texts.late()
        } else {
            Error::new(ErrorCode::RPC_FAIL, self.texts.broken)
        };
        error.with("url", without_query(&self.url)).caused_by(source)
    }
}

impl std::fmt::Debug for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lines").field("url", &self.url).finish_non_exhaustive()
    }
}

impl Answer {
    /// Returns whether the status reports success.
    pub const fn is_success(&self) -> bool {
        self.status >= 200 && self.status < 300
    }

    /// The beginning of the body, for error messages.
    pub fn quoted(&self) -> String {
        String::from_utf8_lossy(&self.body).trim().chars().take(QUOTE_CHARS_MAX).collect()
    }
}

/// Returns whether the text is a URL with a host.
pub fn has_host(url: &str) -> bool {
    url.parse::<Uri>()
        .is_ok_and(|uri| uri.authority().is_some_and(|authority| !authority.host().is_empty()))
}

/// The key in the query would not help the reader of an error.
fn without_query(url: &str) -> &str {
    url.split_once('?').map_or(url, |(url, _)| url)
}
