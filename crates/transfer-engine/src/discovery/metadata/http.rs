//! Upstream's HTTP metadata server: a key is a parameter of the URL.

use mooncake_base::{Error, ErrorCode, Moment, Result, Token, token::METADATA_OWNER_HEADER};
use mooncake_kv_client::http::{Answer, HttpClient, Request, has_host};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use super::{
    MetadataSettings, TEXTS,
    keyed::{KeyClaim, KeyValueServer},
};
use crate::discovery::descriptor::DESCRIPTOR_BYTES_MAX;

/// The characters of a key that a URL carries as percent codes.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// An HTTP metadata server.
#[derive(Debug)]
pub(super) struct HttpServer {
    url: String,
    http_client: HttpClient,
    /// The entries that are written belong to the engines that know it.
    token: Option<Token>,
}

impl HttpServer {
    /// Creates the client of a server.
    ///
    /// # Errors
    /// The text is not a URL with a host.
    pub(super) fn new(url: &str, settings: &MetadataSettings) -> Result<Self> {
        if !has_host(url) || url.contains(['?', '#']) {
            return Err(Error::invalid("not the URL of a metadata server").with("address", url));
        }
        let http_client =
            HttpClient::new(settings.connect_timeout, DESCRIPTOR_BYTES_MAX as u64, &TEXTS);
        Ok(Self { url: url.to_owned(), http_client, token: settings.token.clone() })
    }

    /// Replaces the HTTP client.
    #[cfg(test)]
    pub(super) fn over(self, http_client: HttpClient) -> Self {
        Self { http_client, ..self }
    }

    fn exchange(&self, request: Request<'_>, key: &str, deadline: Moment) -> Result<Answer> {
        let url = format!("{}?key={}", self.url, utf8_percent_encode(key, ESCAPED));
        // Only the owner of an entry changes it.
        let owner = match request {
            Request::Put(_) | Request::Delete => self.token.as_ref(),
            Request::Get | Request::Post(_) | Request::Patch(_) => None,
        };
        let owner = owner.map(|token| token.metadata_owner(key));
        let header = owner.as_deref().map(|owner| (METADATA_OWNER_HEADER, owner));
        self.http_client.call(request, &url, header.as_slice(), deadline)
    }

    fn delete(&self, key: &str, deadline: Moment) -> Result<()> {
        let answer = self.exchange(Request::Delete, key, deadline)?;
        match answer.status {
            200..300 | 404 => Ok(()),
            _ => Err(self.refusal(&answer, key)),
        }
    }

    fn refusal(&self, answer: &Answer, key: &str) -> Error {
        Error::new(ErrorCode::RPC_FAIL, "the metadata server refused the request")
            .with("url", &self.url)
            .with("key", key)
            .with("status", answer.status)
            .with("answer", answer.quoted())
            .with_remedy(
                "Check that the URL is that of a metadata server, as in http://HOST:PORT/metadata; \
                 mooncake_master has one with --enable_http_metadata_server.",
            )
    }
}

impl KeyValueServer for HttpServer {
    fn address(&self) -> &str {
        &self.url
    }

    fn get(&self, key: &str, deadline: Moment) -> Result<Option<Vec<u8>>> {
        let answer = self.exchange(Request::Get, key, deadline)?;
        match answer.status {
            200 => Ok(Some(answer.body)),
            404 => Ok(None),
            _ => Err(self.refusal(&answer, key)),
        }
    }

    fn claim(
        &self,
        claim: KeyClaim<'_>,
        expected: Option<&[u8]>,
        deadline: Moment,
    ) -> Result<Option<Vec<u8>>> {
        // The server cannot compare and swap: between the look and the removal another engine may
        // take the name. The look back below tells.
        if let Some(expected) = expected
            && self.get(claim.key, deadline)?.is_some_and(|holder| holder == expected)
        {
            self.delete(claim.key, deadline)?;
        }
        let answer = self.exchange(Request::Put(claim.value), claim.key, deadline)?;
        match answer.status {
            200..300 if expected.is_some() => {
                Ok(self.get(claim.key, deadline)?.filter(|holder| holder != claim.value))
            }
            200..300 => Ok(None),
            // If an entry is there, status 400 means that another engine holds the name.
            400 => match self.get(claim.key, deadline)? {
                Some(holder) => Ok(Some(holder)),
                None => Err(self.refusal(&answer, claim.key)),
            },
            _ => Err(self.refusal(&answer, claim.key)),
        }
    }

    fn put(&self, _: KeyClaim<'_>, key: &str, value: &[u8], deadline: Moment) -> Result<bool> {
        let answer = self.exchange(Request::Put(value), key, deadline)?;
        match answer.status {
            200..300 => Ok(true),
            _ => Err(self.refusal(&answer, key)),
        }
    }

    fn release(&self, claim: KeyClaim<'_>, key: &str, deadline: Moment) -> Result<()> {
        self.delete(key, deadline)?;
        self.delete(claim.key, deadline)
    }
}

#[cfg(test)]
mod tests;
