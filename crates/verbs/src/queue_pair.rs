//! Queue pairs: the two ends of a reliable connection.
//!
//! A [`QueuePair`] is created without a peer and has a number, which the peers exchange by other means.
//! [`QueuePair::connect`] takes it through the states INIT, RTR and RTS; only a [`ConnectedQueuePair`] can
//! post.

mod handle;

use std::{fmt, mem, ptr::NonNull, sync::Arc};

use rdma_sys::{ibv_qp_init_attr, ibv_qp_type};

use self::handle::Handle;
use crate::{
    CompletionQueue, Context, Error, Gid, Mtu, Posting, ProtectionDomain, Result, posting::Requests,
};

/// A queue pair without a peer.
pub struct QueuePair {
    handle: Handle,
    limits: QueuePairLimits,
    requests: Requests,
}

/// A queue pair that is connected with one of a peer.
///
/// The connection may have failed since; then each request completes with a failure.
pub struct ConnectedQueuePair {
    queue_pair: QueuePair,
}

/// Limits of a queue pair. The driver may round up what was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuePairLimits {
    /// Requests that may be posted and not completed.
    pub requests: u32,
    /// Bytes that a write may carry in the request itself; none where the device refuses as many.
    pub inline_bytes: u32,
    /// Requests of one [`Posting`].
    pub batch: u32,
}

/// The other end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerAddress {
    /// Address of the peer's port.
    pub gid: Gid,
    /// The peer's identifier in an InfiniBand subnet; 0 on Ethernet.
    pub lid: u16,
    /// Number of the peer's queue pair.
    pub queue_pair: u32,
}

/// How a queue pair sends and what it accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionSettings {
    /// Port of the device, numbered from 1.
    pub port: u8,
    /// Entry of the port's address table to send from.
    pub gid_index: u8,
    /// Payload size of a packet; the same at both ends.
    pub mtu: Mtu,
    /// Entry of the port's table of partitions.
    pub partition_index: u16,
    /// Service level of an InfiniBand subnet.
    pub service_level: u8,
    /// Traffic class in the header of each packet, for the switches' quality of service.
    pub traffic_class: u8,
    /// Routers that a packet may pass.
    pub hop_limit: u8,
    /// Time until a packet is sent again: 4.096 us times two to the power of this.
    pub acknowledgement_timeout: u8,
    /// How often a packet is sent again before the connection fails, at most 7.
    pub retries: u8,
    /// How often a packet is sent again for which the peer had no receive; 7 is for ever.
    pub receiver_retries: u8,
    /// Reads in flight, at most what the peer accepts.
    pub outgoing_reads: u8,
    /// Reads of the peer that are served at a time.
    pub incoming_reads: u8,
}

/// State of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueuePairState {
    /// Without a peer.
    Reset,
    /// Has a port.
    Initialized,
    /// Receives.
    ReadyToReceive,
    /// Receives and sends.
    ReadyToSend,
    /// Failed: requests are flushed.
    Failed,
    /// Another state of ibverbs, by its number.
    Other(u32),
}

/// The failure of [`QueuePair::connect`].
#[derive(Debug)]
pub struct ConnectError {
    /// The queue pair, without a peer again, with the same number. None if it could not be reset.
    pub queue_pair: Option<QueuePair>,
    /// Why a transition was refused.
    pub error: Error,
}

impl QueuePair {
    /// Creates a queue pair for a reliable connection that reports to one completion queue. It serves
    /// reads and writes of the peer and posts some; it receives no messages.
    ///
    /// # Errors
    /// A limit is 0 or above that of the device, the domain and the queue are of different devices, or
    /// the driver refused.
    pub fn new(
        domain: &Arc<ProtectionDomain>,
        completions: &Arc<CompletionQueue>,
        wanted: QueuePairLimits,
    ) -> Result<Self> {
        let context = domain.context();
        if !Arc::ptr_eq(context, completions.context()) {
            return Err(Error::OtherDevice {
                expected: context.device().name().to_owned(),
                found: completions.context().device().name().to_owned(),
            });
        }
        if wanted.requests == 0 || wanted.batch == 0 {
            return Err(Error::OutOfRange { what: "the limit of requests", value: 0 });
        }
        // SAFETY: integers and pointers only, for which zero is a value.
        let mut attributes: ibv_qp_init_attr = unsafe { mem::zeroed() };
        attributes.send_cq = completions.as_ptr();
        attributes.recv_cq = completions.as_ptr();
        attributes.qp_type = ibv_qp_type::IBV_QPT_RC;
        attributes.cap.max_send_wr = wanted.requests;
        attributes.cap.max_send_sge = 1;
        attributes.cap.max_inline_data = wanted.inline_bytes;
        let create = context.library().functions.ibv_create_qp;
        let create = |attributes: &mut ibv_qp_init_attr| {
            // SAFETY: the domain and the completion queue live while their `Arc`s do, and `attributes` lives
            // past the call.
            let pointer = unsafe { create(domain.as_ptr(), attributes) };
            NonNull::new(pointer)
                .ok_or_else(|| Error::last("ibv_create_qp", context.device().name()))
        };
        let pointer = create(&mut attributes).or_else(|refused| {
            // A device that carries no bytes in requests, or fewer, does not say which limit it refuses.
            let had_inline = attributes.cap.max_inline_data > 0;
            attributes.cap.max_inline_data = 0;
            attributes.cap.max_send_wr = wanted.requests;
            if had_inline { create(&mut attributes).map_err(|_| refused) } else { Err(refused) }
        })?;
        // SAFETY: the library returned an initialized queue pair, whose number never changes.
        let number = unsafe { (*pointer.as_ptr()).qp_num };
        let (domain, completions) = (Arc::clone(domain), Arc::clone(completions));
        let batch = wanted.batch.min(attributes.cap.max_send_wr);
        Ok(Self {
            handle: Handle { pointer, number, domain, _completions: completions },
            limits: QueuePairLimits {
                requests: attributes.cap.max_send_wr,
                inline_bytes: attributes.cap.max_inline_data,
                batch,
            },
            requests: Requests::new(batch as usize),
        })
    }

    /// The number by which a peer reaches this queue pair.
    pub fn number(&self) -> u32 {
        self.handle.number
    }

    /// The limits that the driver granted.
    pub fn limits(&self) -> QueuePairLimits {
        self.limits
    }

    /// Connects with the peer's queue pair. Accepts the peer's reads and writes from then on.
    ///
    /// # Errors
    /// The driver refused a transition, for instance because no route leads to the peer's address from
    /// the entry of the address table. The queue pair comes back without a peer, to be connected with
    /// other settings.
    pub fn connect(
        self,
        peer: &PeerAddress,
        settings: &ConnectionSettings,
    ) -> Result<ConnectedQueuePair, Box<ConnectError>> {
        let steps = [
            self.handle.initialize(settings),
            self.handle.start_receiving(peer, settings),
            self.handle.start_sending(settings),
        ];
        for step in steps {
            if let Err(error) = self.handle.modify(step) {
                let is_reset = self.handle.modify(Handle::reset()).is_ok();
                let queue_pair = is_reset.then_some(self);
                return Err(Box::new(ConnectError { queue_pair, error }));
            }
        }
        Ok(ConnectedQueuePair { queue_pair: self })
    }

    /// Queries the state.
    ///
    /// # Errors
    /// The driver refused.
    pub fn state(&self) -> Result<QueuePairState> {
        self.handle.state()
    }

    /// The device context of the queue pair.
    pub fn context(&self) -> &Arc<Context> {
        self.handle.context()
    }
}

impl ConnectedQueuePair {
    /// Begins to post requests. They are passed to the device together, by [`Posting::submit`].
    pub fn post(&mut self) -> Posting<'_> {
        let pointer = self.queue_pair.handle.pointer;
        let inline_bytes = self.queue_pair.limits.inline_bytes;
        Posting::new(&mut self.queue_pair.requests, pointer, inline_bytes)
    }

    /// The number by which a peer reaches this queue pair.
    pub fn number(&self) -> u32 {
        self.queue_pair.number()
    }

    /// The limits that the driver granted.
    pub fn limits(&self) -> QueuePairLimits {
        self.queue_pair.limits
    }

    /// Queries the state, which is [`QueuePairState::Failed`] after a request failed.
    ///
    /// # Errors
    /// The driver refused.
    pub fn state(&self) -> Result<QueuePairState> {
        self.queue_pair.state()
    }

    /// Fails the connection: requests that are not completed are flushed and complete with
    /// [`Status::Flushed`](crate::Status::Flushed), and the peer's requests are refused.
    ///
    /// # Errors
    /// The driver refused, as it does when the device was removed.
    pub fn fail(&self) -> Result<()> {
        self.queue_pair.handle.modify(Handle::failed())
    }

    /// Ends the connection. Requests that are not completed are forgotten: their completions may never
    /// arrive, and the device does not touch their memory any more.
    ///
    /// # Errors
    /// The driver refused; the queue pair is destroyed.
    pub fn disconnect(self) -> Result<QueuePair> {
        self.queue_pair.handle.modify(Handle::reset())?;
        Ok(self.queue_pair)
    }

    /// The device context of the queue pair.
    pub fn context(&self) -> &Arc<Context> {
        self.queue_pair.context()
    }
}

impl Default for QueuePairLimits {
    fn default() -> Self {
        Self { requests: 256, inline_bytes: 64, batch: 32 }
    }
}

impl Default for ConnectionSettings {
    fn default() -> Self {
        Self {
            port: 1,
            gid_index: 0,
            mtu: Mtu::Bytes4096,
            partition_index: 0,
            service_level: 0,
            traffic_class: 0,
            hop_limit: 16,
            acknowledgement_timeout: 14,
            retries: 7,
            receiver_retries: 7,
            outgoing_reads: 16,
            incoming_reads: 16,
        }
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair")
            .field("device", &self.context().device().name())
            .field("number", &self.number())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for ConnectedQueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ConnectedQueuePair").field(&self.queue_pair).finish()
    }
}
