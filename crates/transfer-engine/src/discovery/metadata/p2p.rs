//! No metadata server: a segment's name is `host:port` of its owner's handshake socket.

use mooncake_base::sync::RwLock;
use mooncake_base::{Endpoint, Error, Moment, Result};

use super::MetadataStore;
use crate::{
    discovery::{descriptor::SegmentDescriptor, handshake},
    token::Token,
};

/// Finds segments by asking their owners.
#[derive(Debug)]
pub struct P2pStore {
    /// Our descriptor, which is sent with each request.
    own: RwLock<SegmentDescriptor>,
    /// Token that owners must prove, if any.
    token: Option<Token>,
}

impl P2pStore {
    /// Creates a store; with a token, it asks only owners that prove the token.
    pub fn new(token: Option<Token>) -> Self {
        Self { own: RwLock::default(), token }
    }
}

impl MetadataStore for P2pStore {
    fn publish(&self, own: &SegmentDescriptor, _rpc: &Endpoint, _deadline: Moment) -> Result<()> {
        *self.own.write() = own.clone();
        Ok(())
    }

    fn resolve(&self, name: &str, deadline: Moment) -> Result<SegmentDescriptor> {
        let endpoint = self.locate(name, deadline)?;
        let own = self.own.read().clone();
        handshake::fetch_descriptor(&endpoint, &own, self.token.as_ref(), deadline)
    }

    fn locate(&self, name: &str, _deadline: Moment) -> Result<Endpoint> {
        let endpoint: Endpoint = name.parse()?;
        if endpoint.port.is_none_or(|port| port == 0) {
            let text = "with P2PHANDSHAKE a segment name must be host:port";
            return Err(Error::invalid(text).with("segment", name));
        }
        Ok(endpoint)
    }

    fn withdraw(&self, _deadline: Moment) -> Result<()> {
        *self.own.write() = SegmentDescriptor::default();
        Ok(())
    }
}
