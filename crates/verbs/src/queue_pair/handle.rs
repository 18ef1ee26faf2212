//! The queue pair of the library, and how it is taken from state to state.

use std::{mem, ptr::NonNull, sync::Arc};

use rdma_sys::{
    ibv_access_flags, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask as mask, ibv_qp_init_attr, ibv_qp_state,
};

use super::{ConnectionSettings, PeerAddress, QueuePairState};
use crate::{CompletionQueue, Context, ProtectionDomain, Result};

/// The owned queue pair of the library.
pub(super) struct Handle {
    pub(super) pointer: NonNull<ibv_qp>,
    pub(super) number: u32,
    pub(super) domain: Arc<ProtectionDomain>,
    /// Outlives the queue pair, as the domain does.
    pub(super) _completions: Arc<CompletionQueue>,
}

// SAFETY: ibverbs allows every call on a queue pair from several threads at once (the driver locks it);
// only `Drop` destroys it.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// Attributes of a transition, and which of them count.
type Transition = (ibv_qp_attr, mask);

impl Handle {
    /// Takes the queue pair to another state.
    pub(super) fn modify(&self, (mut attributes, chosen): Transition) -> Result<()> {
        let modify = self.context().library().functions.ibv_modify_qp;
        let chosen = chosen.0.cast_signed();
        // SAFETY: the queue pair lives while `self` does, and `attributes` lives past the call.
        let code = unsafe { modify(self.pointer.as_ptr(), &raw mut attributes, chosen) };
        self.context().check("ibv_modify_qp", code)
    }

    pub(super) fn state(&self) -> Result<QueuePairState> {
        let (mut attributes, _) = Self::to(ibv_qp_state::IBV_QPS_RESET);
        // SAFETY: integers and pointers only, for which zero is a value.
        let mut initial: ibv_qp_init_attr = unsafe { mem::zeroed() };
        let query = self.context().library().functions.ibv_query_qp;
        let wanted = mask::IBV_QP_STATE.0.cast_signed();
        // SAFETY: the queue pair lives while `self` does, and both results live past the call.
        let code =
            unsafe { query(self.pointer.as_ptr(), &raw mut attributes, wanted, &raw mut initial) };
        self.context().check("ibv_query_qp", code)?;
        Ok(match attributes.qp_state {
            ibv_qp_state::IBV_QPS_RESET => QueuePairState::Reset,
            ibv_qp_state::IBV_QPS_INIT => QueuePairState::Initialized,
            ibv_qp_state::IBV_QPS_RTR => QueuePairState::ReadyToReceive,
            ibv_qp_state::IBV_QPS_RTS => QueuePairState::ReadyToSend,
            ibv_qp_state::IBV_QPS_ERR => QueuePairState::Failed,
            other => QueuePairState::Other(other),
        })
    }

    fn to(state: ibv_qp_state::Type) -> Transition {
        // SAFETY: integers and arrays of integers only, for which zero is a value.
        let mut attributes: ibv_qp_attr = unsafe { mem::zeroed() };
        attributes.qp_state = state;
        (attributes, mask::IBV_QP_STATE)
    }

    pub(super) fn reset() -> Transition {
        Self::to(ibv_qp_state::IBV_QPS_RESET)
    }

    pub(super) fn failed() -> Transition {
        Self::to(ibv_qp_state::IBV_QPS_ERR)
    }

    pub(super) fn initialize(&self, settings: &ConnectionSettings) -> Transition {
        let (mut attributes, state) = Self::to(ibv_qp_state::IBV_QPS_INIT);
        attributes.pkey_index = settings.partition_index;
        attributes.port_num = settings.port;
        let access = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE
            | ibv_access_flags::IBV_ACCESS_REMOTE_READ
            | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;
        attributes.qp_access_flags = access.0;
        (
            attributes,
            state | mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS,
        )
    }

    pub(super) fn start_receiving(
        &self,
        peer: &PeerAddress,
        settings: &ConnectionSettings,
    ) -> Transition {
        let (mut attributes, state) = Self::to(ibv_qp_state::IBV_QPS_RTR);
        attributes.path_mtu = settings.mtu.code();
        attributes.dest_qp_num = peer.queue_pair;
        attributes.rq_psn = 0;
        attributes.max_dest_rd_atomic = settings.incoming_reads;
        attributes.min_rnr_timer = 12; // 0.64 ms; nothing is received, so that it never counts
        let route = &mut attributes.ah_attr;
        route.is_global = 1;
        route.grh.dgid.raw = peer.gid.0;
        route.grh.sgid_index = settings.gid_index;
        route.grh.hop_limit = settings.hop_limit;
        route.grh.traffic_class = settings.traffic_class;
        route.dlid = peer.lid;
        route.sl = settings.service_level;
        route.port_num = settings.port;
        let chosen = state
            | mask::IBV_QP_AV
            | mask::IBV_QP_PATH_MTU
            | mask::IBV_QP_DEST_QPN
            | mask::IBV_QP_RQ_PSN
            | mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | mask::IBV_QP_MIN_RNR_TIMER;
        (attributes, chosen)
    }

    pub(super) fn start_sending(&self, settings: &ConnectionSettings) -> Transition {
        let (mut attributes, state) = Self::to(ibv_qp_state::IBV_QPS_RTS);
        attributes.timeout = settings.acknowledgement_timeout;
        attributes.retry_cnt = settings.retries;
        attributes.rnr_retry = settings.receiver_retries;
        attributes.sq_psn = 0;
        attributes.max_rd_atomic = settings.outgoing_reads;
        let chosen = state
            | mask::IBV_QP_TIMEOUT
            | mask::IBV_QP_RETRY_CNT
            | mask::IBV_QP_RNR_RETRY
            | mask::IBV_QP_SQ_PSN
            | mask::IBV_QP_MAX_QP_RD_ATOMIC;
        (attributes, chosen)
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        self.domain.context()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let destroy = self.context().library().functions.ibv_destroy_qp;
        // SAFETY: the queue pair came from this library and is destroyed once, here. Events of it are
        // acknowledged when they are taken.
        unsafe { destroy(self.pointer.as_ptr()) };
    }
}
