//! Environment variables of upstream's engine and store that have no effect here, with the reason.

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
    unsupported(&["MC_RPC_PROTOCOL"],
        "Messages to the master go over TCP or a Unix socket; only the bytes of objects go over RDMA. The caller's argument `protocol` selects RDMA for them."),
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
    unsupported(&["MC_USE_TENT", "MC_USE_TEV1", "MC_TENT_CONF", "MC_TENT_RPC_THREADS"],
        "They select and tune another transfer engine of upstream, which this package does not have."),
    unsupported(&["MC_NUM_CQ_PER_CTX", "MC_NUM_COMP_CHANNELS_PER_CTX", "MC_WORKERS_PER_CTX"],
        "Each RDMA device has one completion queue and one thread that takes completions; the calling threads post their own requests."),
    unsupported(&["MC_AUTO_GID_MAX_RETRIES"],
        "The address of an RDMA device is chosen once, by kind, scope and network interface; MC_GID_INDEX names another one."),
    unsupported(&["MC_MAX_SGE"],
        "An RDMA request has one local range; MC_SLICE_SIZE sets its length."),
    unsupported(&["MC_ENDPOINT_STORE_TYPE"],
        "When MC_MAX_EP_PER_CTX pairs of RDMA devices are connected, the oldest pair that is not in use is closed."),
    unsupported(&["MC_MIN_REG_SIZE", "MC_ENABLE_PARALLEL_REG_MR", "MC_MAX_CONCURRENT_REG_MR"],
        "Memory is registered as it is given, with all RDMA devices at the same time; MC_MAX_MR_SIZE limits the length of one registration."),
    unsupported(&["MC_PATH_ROUNDROBIN"],
        "A slice goes to the pair of RDMA devices that is estimated to be done first, by its bytes in flight and its measured rate."),
    unsupported(&["MC_MLX5_QP_UDP_SPORTS", "MC_MLX5_QP_LAG_PORT_BALANCE"],
        "They set attributes of the driver mlx5 that the common verbs do not have; raise MC_NUM_QP_PER_EP to use more flows of a bonded link."),
    unsupported(&["MC_LOG_RDMA_SLICE_AFFINITY", "MC_TRACK_RDMA_POSTED_SLICES"],
        "The metrics of an engine count bytes, slices and errors of each RDMA device (mooncake_transfer_device_*)."),
    unsupported(&["WITH_NVIDIA_PEERMEM"],
        "Memory of CUDA devices is registered as a dma-buf, else as peer memory; MC_DISABLE_GPU_DIRECT_RDMA=1 registers none."),
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
    unsupported(&[
        "MC_STORE_CLIENT_SETUP_RETRIES",
    ], "The port of a client is bound before it is published, so that no attempt needs to be repeated."),
    unsupported(&[
        "MC_STORE_LOCAL_HOT_ADMISSION_THRESHOLD", "MC_STORE_LOCAL_HOT_BLOCK_SIZE",
        "MC_STORE_LOCAL_HOT_CACHE_SIZE", "MC_STORE_LOCAL_HOT_CACHE_USE_SHM",
    ], "There is no cache of remote objects in a client yet; a read that repeats goes to the holder again. Put a second copy near the readers instead."),
    unsupported(&[
        "MC_STORE_REPLICA_SCORING",
    ], "A read always takes the copy whose holder was measured to be the fastest."),
    unsupported(&[
        "MC_DISABLE_MMAP_ARENA", "MC_MMAP_ARENA_POOL_SIZE",
    ], "Memory is allocated by segment; see MC_PREFAULT_SIZE and MC_STORE_USE_HUGEPAGE."),
    unsupported(&[
        "MC_STORE_PINNED_RESTORE_ARENA_SIZE_BYTES", "MC_STORE_PIN_MEMORY_MAX_BYTES",
    ], "Device memory is staged through a few pinned buffers of a fixed size."),
    unsupported(&[
        "MC_CXL_DEV_PATH", "MC_CXL_DEV_SIZE",
    ], "CXL memory is not supported."),
    unsupported(&[
        "MC_NOF_DEBUG", "MC_NOF_DEBUG_INTERVAL_MS", "MC_NOF_INFLIGHT_BYTES_LIMIT", "MC_NOF_SUBMIT_CHUNK_BYTES",
        "MC_NOF_TRTYPE", "MC_NOF_WORKERS", "MC_NVME_ADMIN_QUEUE_SIZE", "MC_NVME_DATA_DIGEST",
        "MC_NVME_FABRICS_CONNECT_TIMEOUT_US", "MC_NVME_HEADER_DIGEST", "MC_NVME_IO_QUEUE_REQUESTS",
        "MC_NVME_IO_QUEUE_SIZE", "MC_NVME_NUM_IO_QUEUES", "MC_NVME_TRANSPORT_ACK_TIMEOUT",
    ], "Segments on NVMe over fabrics are not supported."),
    unsupported(&[
        "MOONCAKE_NVME_KV_BATCH_SUBMIT_CONCURRENCY", "MOONCAKE_NVME_KV_DEVICE_PATH", "MOONCAKE_NVME_KV_DRIVER",
        "MOONCAKE_NVME_KV_IO_CONCURRENCY", "MOONCAKE_NVME_KV_MAX_IO_CONCURRENCY", "MOONCAKE_NVME_KV_NSID",
        "MOONCAKE_NVME_KV_PREPARE_CONCURRENCY", "MOONCAKE_NVME_KV_PROTOCOL_MAX_VALUE_SIZE",
        "MOONCAKE_NVME_KV_QUEUE_DEPTH", "MOONCAKE_NVME_KV_READ_PLAN_BATCH_SIZE",
        "MOONCAKE_NVME_KV_ROOT_SUBMIT_CONCURRENCY", "MOONCAKE_NVME_KV_RUNTIME_TRANSFER_LIMIT",
        "MOONCAKE_NVME_KV_TRANSFER_ALIGNMENT_BYTES", "MOONCAKE_NVME_KV_TRANSPORT",
        "MOONCAKE_NVME_KV_VALUE_BLOCK_UNIT_BYTES",
    ], "Key-value NVMe devices are not supported."),
    unsupported(&[
        "MOONCAKE_DFS_ALIGNMENT", "MOONCAKE_DFS_ALLOCATOR", "MOONCAKE_DFS_BUCKET_CAPACITY",
        "MOONCAKE_DFS_DEFERRED_FREE_SECONDS", "MOONCAKE_DFS_EVICTION_CHECK_INTERVAL",
        "MOONCAKE_DFS_EVICTION_ENABLED", "MOONCAKE_DFS_EVICTION_HIGH_WATERMARK",
        "MOONCAKE_DFS_EVICTION_LOW_WATERMARK", "MOONCAKE_DFS_FS_ADAPTER", "MOONCAKE_DFS_MAX_BUCKET_COUNT",
        "MOONCAKE_DFS_ROOT_DIR", "MOONCAKE_DFS_SHARD_CAPACITY", "MOONCAKE_DFS_SHARD_COUNT",
        "MOONCAKE_DFS_SINGLE_TENANT", "MOONCAKE_DISTRIBUTED_FS_TYPE", "MOONCAKE_DISTRIBUTED_HEALTH_CHECK",
        "MOONCAKE_DISTRIBUTED_ROOT_DIR",
    ], "A directory that several hosts share is not supported; give each host a directory of its own with MOONCAKE_OFFLOAD_FILE_STORAGE_PATH."),
    unsupported(&[
        "MOONCAKE_AWS_ACCESS_KEY_ID", "MOONCAKE_AWS_BUCKET_NAME", "MOONCAKE_AWS_CONNECT_TIMEOUT_MS",
        "MOONCAKE_AWS_REGION", "MOONCAKE_AWS_REQUEST_CHECKSUM_CALCULATION", "MOONCAKE_AWS_REQUEST_TIMEOUT_MS",
        "MOONCAKE_AWS_RESPONSE_CHECKSUM_VALIDATION", "MOONCAKE_AWS_S3_ENDPOINT",
        "MOONCAKE_AWS_SECRET_ACCESS_KEY", "MOONCAKE_AWS_USE_HTTPS", "MOONCAKE_AWS_USE_VIRTUAL_ADDRESSING",
        "MOONCAKE_SNAPSHOT_LOCAL_PATH",
    ], "Snapshots of upstream's kind are not supported; the master keeps its state in --state_dir."),
    unsupported(&["MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR"],
        "There is one layout of files on disk: preallocated files of up to 256 MiB to which records are appended, as `mooncake disk ls` shows them."),
    unsupported(&[
        "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES", "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT",
    ], "No object waits for a bucket to be full: each is written when its disk takes it over, in files of 256 MiB or 1/16 of the directory."),
    unsupported(&[
        "MOONCAKE_BUCKET_EVICTION_POLICY", "MOONCAKE_OFFLOAD_BUCKET_EVICTION_POLICY",
        "MOONCAKE_OFFLOAD_ENABLE_EVICTION", "ENABLE_EVICTION", "MOONCAKE_OFFSET_EVICTION_POLICY",
        "MOONCAKE_OFFSET_MAX_EVICT_PER_OFFLOAD",
    ], "A full directory always drops a whole file of the oldest and least read records; records that were read lately are kept."),
    unsupported(&[
        "MOONCAKE_BUCKET_MAX_TOTAL_SIZE", "MOONCAKE_OFFLOAD_BUCKET_MAX_PHYSICAL_BYTES",
        "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE", "MOONCAKE_OFFSET_HIGH_RATIO", "MOONCAKE_OFFSET_LOW_RATIO",
        "MOONCAKE_OFFSET_MAX_CAPACITY_NODES",
    ], "The size of a directory is that of MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES, all files and their unused space included."),
    unsupported(&["MOONCAKE_OFFLOAD_BUCKET_DISK_SCAN_CACHE_MS"],
        "Nothing scans a directory to learn its size: its owner counts the files."),
    unsupported(&["MOONCAKE_OFFLOAD_FSDIR"],
        "The files lie in the directory itself, not in one below it."),
    unsupported(&["MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS"],
        "No object waits for a heartbeat: the owner of a directory is told at once which objects to write."),
    unsupported(&[
        "MOONCAKE_OFFLOAD_CLIENT_BUFFER_GC_INTERVAL_SECONDS", "MOONCAKE_OFFLOAD_CLIENT_BUFFER_GC_TTL_MS",
    ], "Memory through which a record goes to its reader is free again when the reader says so or its connection ends; a reader that says nothing for 30 seconds loses both."),
    unsupported(&["MOONCAKE_OFFLOAD_SCANMETA_ITERATOR_KEYS_LIMIT", "MOONCAKE_SCANMETA_ITERATOR_KEYS_LIMIT"],
        "A start reads the lists at the end of the files, and announces their records in calls of up to 65,536."),
    unsupported(&["MOONCAKE_OFFSET_PERSIST_INTERVAL_SECONDS", "MOONCAKE_OFFSET_PERSIST_MODE"],
        "Records are always found again after a restart; they reach the device within 5 seconds."),
    unsupported(&["MOONCAKE_OFFSET_RECORD_CRC"],
        "Records always have checksums, and each read compares them."),
    unsupported(&["MC_FILEREAD_WORKERS"],
        "A directory is read through io_uring with 128 reads in flight, or by 32 threads; see MOONCAKE_OFFLOAD_USE_URING."),
];
