//! Environment variables of the upstream transfer engine that have no effect here, with the reason.

/// A group of variables that have no effect, for one reason.
#[derive(Debug, Clone, Copy)]
pub struct Unsupported {
    /// The names of the variables.
    pub names: &'static [&'static str],
    /// The reason, and what to use instead, in one sentence.
    pub reason: &'static str,
}

const fn unsupported(names: &'static [&'static str], reason: &'static str) -> Unsupported {
    Unsupported { names, reason }
}

/// Every group, in the order of the reference page.
#[rustfmt::skip] // A table: names, then the reason.
pub static UNSUPPORTED: &[Unsupported] = &[
    unsupported(&["MC_LOG_DIR"],
        "The log goes to standard error; mooncake.log_to_python sends it to Python's logging instead."),
    unsupported(&["MC_METADATA_SERVER", "MC_MASTER_ADDR"],
        "The caller passes the addresses of the servers as arguments; upstream's Python interface does not read these variables either."),
    unsupported(&["MC_YLT_LOG_LEVEL"],
        "RPC messages go to the common log; see MC_LOG_LEVEL and MOONCAKE_LOG."),
    unsupported(&["MC_TE_RPC_CLIENT_IO_THREADS", "MC_STORE_RPC_CLIENT_IO_THREADS", "MC_RPC_CLIENT_IO_THREADS"],
        "Each calling thread does the I/O of its calls."),
    unsupported(&["MC_RPC_PROTOCOL", "MC_MS_AUTO_DISC", "MC_MS_FILTERS"],
        "The arguments of the caller select RDMA and its network devices."),
    unsupported(&["MC_FORCE_HCA"],
        "Where RDMA devices cannot be used, transfers go over TCP and the log has the reason."),
    unsupported(&["MC_TE_METADATA_REFRESH_INTERVAL_SECONDS", "MC_DISABLE_METACACHE"],
        "A segment descriptor is fetched again whenever a path to its engine breaks or a range is refused."),
    unsupported(&["MC_TCP_SLICE_SIZE"],
        "Transfers over TCP are not split into slices of a fixed size; the deadline applies to the whole transfer."),
    unsupported(&["MC_CONN_PAUSE_TTL_MS"],
        "A transfer tries every path and reconnects to a lost peer once; an unreachable peer is not contacted again for 0.2 seconds."),
    unsupported(&["MC_TCP_ENABLE_CONNECTION_POOL"],
        "Connections are always pooled; MC_TCP_LANES_PER_PEER limits their number."),
    unsupported(&["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", "MC_TCP_ADMISSION_TIMEOUT_MS"],
        "Callers wait for a connection until their deadline, instead of being refused when a queue is full."),
    unsupported(&["MC_TCP_PROTO"],
        "Connections to current peers always use acknowledged frames; peers that support only the older frames without acknowledgement are still served."),
    unsupported(&["MC_TCP_STATUS_TIMEOUT_SEC"],
        "The deadline of a transfer (see MC_TRANSFER_TIMEOUT) also covers its acknowledgement."),
    unsupported(&["MC_USE_TENT", "MC_USE_TEV1", "MC_TENT_CONF", "MC_TENT_RPC_THREADS", "MC_TE_FILTERS", "MC_TE_FILTERS_EXCLUDE"],
        "They select and tune another transfer engine of upstream, which this package does not have."),
    unsupported(&[
        "MC_NUM_CQ_PER_CTX", "MC_NUM_COMP_CHANNELS_PER_CTX", 
        "MC_AUTO_GID_MAX_RETRIES", 
        "MC_MAX_SGE", "MC_WORKERS_PER_CTX", 
        "MC_MIN_REG_SIZE", "MC_ENDPOINT_STORE_TYPE", 
        "MC_MLX5_QP_UDP_SPORTS", "MC_MLX5_QP_LAG_PORT_BALANCE",
        "MC_ENABLE_DEST_DEVICE_AFFINITY", "MC_ENABLE_HCA_PEER_AFFINITY", "MC_NIC_PEER_AFFINITY",
        "MC_LOG_RDMA_SLICE_AFFINITY", "MC_TRACK_RDMA_POSTED_SLICES", "MC_ENABLE_PARALLEL_REG_MR",
        "MC_MAX_CONCURRENT_REG_MR", "MC_PATH_ROUNDROBIN", "WITH_NVIDIA_PEERMEM", "MC_RDMA_BIND_ADDRESS",
        "MC_DISABLE_GPU_DIRECT_RDMA",
    ], "They tune parts of upstream's RDMA transport that ours does not have, or chooses itself."),
    unsupported(&["MC_EFA_CQ_THREADS", "MC_EFA_NIC_SELECTION", "MC_EID_INDEX", "USE_BAREX", "BAREX_USE_RANDOM_DEV"],
        "They configure network devices of other kinds (EFA, URMA, Barex), which are not supported."),
    unsupported(&[
        "MC_FORCE_MNNVL", "MC_ENABLE_MNNVL", "MC_INTRA_NVLINK", "MC_INTRANODE_NVLINK", "MC_USE_NVLINK_IPC",
        "MC_USE_HIP_IPC", "MC_DISABLE_HIP", "MC_HIP_NUM_STREAMS", "MC_HIP_NUM_EVENTS", "MOONCAKE_DISABLE_HIP_DMABUF",
        "MC_DISABLE_MACA", "MC_MACA_HOST_TRANSPORT", "MC_MACA_BATCHFLAG_MIN_BYTES", "MC_MACA_CALLER_SYNC",
        "MC_MACA_COPY_API", "MC_DISABLE_MUSA", "MC_FORCE_MUSA", "MC_MUSA_COPY_API",
        "MC_MUSA_TRANSFER_BATCH_MIN_BYTES", "MC_MUSA_IPC_OPEN_DEVICE", "MC_USE_UBSHMEM_IPC",
        "MC_UBSHMEM_STREAMS_PER_TRANSFER", "MC_UBSHMEM_NUM_STREAMS", "MC_UBSHMEM_THREAD_POOL_SIZE",
        "MC_UBSHMEM_MAX_STREAMS", "MC_UBSHMEM_GET_STREAM_TIMEOUT", "MC_TANGRT_ROOT", "MC_TANGRT_LIB_DIR",
        "MC_TANGRT_LIB_ARCH", "MC_TPU_PJRT_LIB", "SUNRISE_USE_DEVICE_MEM",
    ], "They configure direct links between accelerators, which are not supported; device memory is transferred through host memory."),
];
