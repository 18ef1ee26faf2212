//! Directories in which a client keeps copies of objects for the pool, and reads of such copies.
//!
//! | File | Content |
//! |---|---|
//! | [`owner`] | one directory: opened, described to the master, read, closed |
//! | [`staging`] | registered memory that records are loaded into for their readers |
//! | [`server`] | the record server: loads records for readers in other processes |
//! | [`reader`] | connections to the record servers of other processes |
//! | [`wire`] | frames and the greeting of such a connection, for both sides |
//! | [`lent_memory`] | memory that reads and writes of records go to and come from |
//! | [`record_range`] | cuts a read into ranges that are loaded at once |
//!
//! What decides and talks to the master lies elsewhere: `client/offload.rs` takes over objects and
//! reports records, `client/read/disk.rs` reads.

pub(crate) mod lent_memory;
pub(crate) mod owner;
pub(crate) mod reader;
pub(crate) mod record_range;
pub(crate) mod server;
pub(crate) mod staging;
mod wire;

use std::sync::Arc;

use mooncake_base::{Error, Result, SegmentId};
use mooncake_proto::records;
use mooncake_transfer_engine::Engine;

use self::{
    owner::Owner,
    reader::RecordReaders,
    server::{RecordServer, Served},
    staging::Staging,
};
use crate::{config::ClientConfig, metrics::Metrics};

/// The least staging memory: a range that is loaded at once fits in several times.
const STAGING_BYTES_MIN: u64 = 64 << 20;

/// The directories of one client, and its connections to those of others.
#[derive(Debug)]
pub(crate) struct Disks {
    owners: Arc<[Arc<Owner>]>,
    staging: Arc<Staging>,
    server: Option<RecordServer>,
    readers: RecordReaders,
}

impl Disks {
    /// Opens the directories and starts to serve their records.
    ///
    /// # Errors
    /// A directory is in use or is none of records, or the server cannot listen.
    pub(crate) fn open(
        config: &ClientConfig,
        engine: &Engine,
        metrics: &Arc<Metrics>,
    ) -> Result<Self> {
        let token = config.disk_token.as_ref().map(records::token);
        let bytes = config.disk_staging_bytes.max(STAGING_BYTES_MIN);
        let staging = Arc::new(Staging::new(engine.clone(), bytes, metrics));
        let mut owners: Vec<Arc<Owner>> = Vec::with_capacity(config.disks.len());
        for disk in &config.disks {
            let owner = Owner::open(disk, &config.disk_limits, metrics)?;
            if let Some(other) = owners.iter().find(|other| other.id() == owner.id()) {
                return Err(Error::invalid(
                    "one directory is a copy of another; empty one of them",
                )
                .with("path", owner.path().display())
                .with("other", other.path().display()));
            }
            owners.push(Arc::new(owner));
        }
        let owners: Arc<[Arc<Owner>]> = owners.into();
        let server = if owners.is_empty() {
            None
        } else {
            let (owners, staging) = (Arc::clone(&owners), Arc::clone(&staging));
            let endpoint = engine.segment_name().to_owned();
            let served = Served { owners, staging, endpoint, token: token.clone() };
            Some(RecordServer::start(engine, served)?)
        };
        Ok(Self { owners, staging, server, readers: RecordReaders::new(token) })
    }

    /// Returns the directories.
    pub(crate) fn owners(&self) -> &[Arc<Owner>] {
        &self.owners
    }

    /// Returns the directory of this client with the id.
    pub(crate) fn owner(&self, id: SegmentId) -> Option<&Arc<Owner>> {
        self.owners.iter().find(|owner| owner.id() == id)
    }

    /// Returns the address at which the records are served; empty without directories.
    pub(crate) fn endpoint(&self) -> &str {
        self.server.as_ref().map_or("", RecordServer::endpoint)
    }

    /// Returns the memory that records are loaded into.
    pub(crate) fn staging(&self) -> &Arc<Staging> {
        &self.staging
    }

    /// Returns the connections to record servers.
    pub(crate) fn readers(&self) -> &RecordReaders {
        &self.readers
    }

    /// Stops serving, ends the reads from other processes, and closes the directories. Blocks until
    /// what was written last has reached the devices.
    pub(crate) fn close(&self) {
        self.readers.close();
        if let Some(server) = &self.server {
            server.stop();
        }
        for owner in &*self.owners {
            owner.close();
        }
    }
}
