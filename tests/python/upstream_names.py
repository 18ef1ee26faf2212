"""Upstream's public names as data, from its documents and from what its wheel exports.

Calls of `mooncake.store` are in `upstream_store_api` and `upstream_tensor_api`.
"""

from __future__ import annotations

from typing import Final

_STORE_NAMES: Final = """
    BufferHandle BufferPool MooncakeDistributedStore MooncakeHostMemAllocator ReplicaStatus
    ReplicateConfig
"""
_BACKEND: Final = """
    MooncakeBackendOptions createMooncakeBackend createMooncakeCpuBackend extend_group_size_to
    get_active_ranks get_num_synced_ranks get_peer_state get_preferred_hca recover_ranks
    set_device_filter set_host_ip
"""
_EP: Final = """
    Buffer ElasticBuffer EventHandle MAX_QP_COUNT calculate_elastic_buffer_size
    get_ep_buffer_size_hint
"""
_IDS: Final = """
    LeaseId ParticipantId PlacementFragmentId PlacementId PlacementSetId ResourceId RevisionId
    RuntimeFragmentId RuntimeInstanceId StoredFragmentId TensorId TopologyId
"""
_MANIFESTS: Final = """
    PlacementManifest ResourceKind ResourceManifest RuntimeBindingManifest StoredResourceManifest
    validate_resource_binding_identity
"""
_TYPES: Final = """
    OwnershipAxis ParallelRank PlacementFragment ReplicatedAxis RuntimeBindingFragment SplitAxis
    TensorDescriptor
"""
_PLACEMENTS: Final = """
    ParallelTopology TopologyParticipant WeightPlacementManifest WeightPlacementPart
    WeightRuntimeBindingManifest validate_runtime_binding validate_runtime_bindings
"""
_PLANNER: Final = """
    LogicalTransferOperation LogicalTransferPlan PipelineRouteGroup PlacementExecutorPlan
    PlanningLimits TransferRegion plan_placement_transfer plan_placement_transfer_to_local_target
    plan_stored_transfer_to_target_placement
"""

MODULES: Final[dict[str, str]] = {
    "mooncake": "BufferPool RegisteredBufferPool extend_path",
    "mooncake._ep": _EP,
    "mooncake.async_store": "MooncakeDistributedStoreAsync",
    "mooncake.buffer_pool": "BufferPool RegisteredBufferPool",
    "mooncake.cli": "main",
    "mooncake.cli_bench": "main",
    "mooncake.cli_client": "main",
    "mooncake.dataproto_catalog": "DataProtoCatalog DataProtoCatalogTransfer logger",
    "mooncake.engine": "TransferEngine TransferNotify TransferOpcode",
    "mooncake.ep": f"{_EP} {_BACKEND} torch_version version_suffix",
    "mooncake.fabric_allocator_utils": """
        ProbeValue get_mooncake_so_path logger probe_allocator_backend
    """,
    "mooncake.http_metadata_server": "KVBootstrapServer KVPoll main parse_args",
    "mooncake.mooncake_config": """
        DEFAULT_GLOBAL_SEGMENT_SIZE DEFAULT_LOCAL_BUFFER_SIZE MooncakeConfig logger
    """,
    "mooncake.mooncake_connector_v1": """
        EngineId MooncakeAgentMetadata MooncakeConnector MooncakeConnectorMetadata
        MooncakeConnectorScheduler MooncakeConnectorWorker RecvReqMeta ReqId SendBlockMeta
        TRANS_DONE TRANS_ERROR VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT VLLM_MOONCAKE_PROTOCOL
        VLLM_MOONCAKE_SENDER_WORKERS VLLM_MOONCAKE_SIDE_CHANNEL_PORT
        get_mooncake_side_channel_port group_concurrent_contiguous logger zmq_ctx
    """,
    "mooncake.mooncake_elastic_buffer": "EPHandle ElasticBuffer EventOverlap",
    "mooncake.mooncake_ep_buffer": "Buffer EventOverlap",
    "mooncake.mooncake_ssd_register": "MooncakeNoFRegister main parse_arguments",
    "mooncake.mooncake_ssd_unregister": "MooncakeNoFUnregister main parse_arguments",
    "mooncake.mooncake_store_service": "MooncakeStoreService main parse_arguments sync_main",
    "mooncake.pg": f"""
        {_BACKEND} activate_ranks deactivate_ranks get_current_epoch get_failed_ranks_hint
        get_local_success join_group set_collective_timeout_us set_fault_reconciliation_window_us
        set_p2p_timeout_us set_transfer_engine sync_after_failure torch_version version_suffix
    """,
    "mooncake.reshard": """
        PlacementManifest ResourceKind ResourceManifest RuntimeBindingManifest
    """,
    "mooncake.reshard.contracts": f"{_IDS} {_MANIFESTS} RuntimeBindingFragment",
    "mooncake.reshard.contracts.fragments": "RuntimeBindingFragment",
    "mooncake.reshard.contracts.ids": _IDS,
    "mooncake.reshard.contracts.manifest": _MANIFESTS,
    "mooncake.reshard.geometry": """
        LogicalBox OverlapRegion box_contains boxes_exactly_cover boxes_overlap
        regions_exactly_cover
    """,
    "mooncake.reshard.weight": f"""
        {_TYPES} {_PLACEMENTS} {_PLANNER} StoredFragment WeightManifest weight_placement_from_json
        weight_placement_to_json
    """,
    "mooncake.reshard.weight.binding": "validate_runtime_binding validate_runtime_bindings",
    "mooncake.reshard.weight.manifest": f"{_TYPES} {_PLACEMENTS}",
    "mooncake.reshard.weight.part": "WeightPlacementPart",
    "mooncake.reshard.weight.placement": "WeightPlacementManifest",
    "mooncake.reshard.weight.planner": _PLANNER,
    "mooncake.reshard.weight.runtime": "WeightRuntimeBindingManifest",
    "mooncake.reshard.weight.serde": """
        JsonObject JsonScalar JsonValue weight_placement_from_json weight_placement_to_json
    """,
    "mooncake.reshard.weight.storage_manifest": """
        StoredAliasDescriptorKey StoredAliasGeometryKey StoredFragment StoredGeometryKey
        StoredManifestIdentity WeightManifest validate_weight_manifest_snapshot
    """,
    "mooncake.reshard.weight.topology": "ParallelTopology TopologyParticipant",
    "mooncake.reshard.weight.types": f"""
        {_TYPES} ParallelAxis ParallelAxisKind SplitAxisKind canonical_strides_bytes
        require_manifest_items require_sha256_digest validate_fragment_geometry
    """,
    "mooncake.reshard.weight.validation": "",
    "mooncake.shared_segment": """
        SharedSegment SharedSegmentError create_shared_segment shared_segment_supported
    """,
    "mooncake.spdk_tgt_create": "SPDKTgtCreator main parse_arguments",
    "mooncake.store": _STORE_NAMES,
    "mooncake.structured_object_store": """
        AUTO_PARALLEL_MIN_BYTES AUTO_PARALLEL_MIN_CHUNKS BundleStore BundleTransferPolicy
        DATAPROTO_REF_HANDLE_TYPE DATAPROTO_REF_HANDLE_VERSION DEFAULT_BUNDLE_CHUNK_BYTES
        DataProtoRefLike FieldSchema MISSING MISSING_OBJECT_ERROR MooncakeBundleTransfer
        MooncakeDataProtoRef RemoteBundleRef STORAGE_GROUP_ID STRUCTURED_FIELD_SPECS_KEY
        StructuredFieldLocation StructuredMemberSlice StructuredObjectPayload
        StructuredObjectReadSpec StructuredObjectResult export_dataproto_ref export_ref
        import_dataproto_ref import_ref infer_structure is_dataproto_ref_handle raw_destination
        tensor_object_buffer
    """,
    "mooncake.transfer_engine_topology_dump": """
        apply_backend dump_te_topology dump_tent_topology main parse_args resolve_backend
        sanitize_tent_conf_for_discover
    """,
    "mooncake.vllm_v1_proxy_server": """
        app get_next_client handle_chat_completions handle_completions healthcheck lifespan logger
        parse_args send_request_to_service stream_service_response
    """,
}

MEMBERS: Final[dict[str, str]] = {
    "mooncake.dataproto_catalog:DataProtoCatalog": """
        ack_publication ack_retired drain list publish publish_append release_read remove resolve
        update
    """,
    "mooncake.dataproto_catalog:DataProtoCatalogTransfer": """
        append attach_results close discard_results drain list put release_read release_result
        remove resolve
    """,
    "mooncake.engine:TransferEngine": """
        allocate_managed_buffer batch_register_memory batch_transfer_async_read
        batch_transfer_async_write batch_transfer_sync_read batch_transfer_sync_write
        batch_unregister_memory free_managed_buffer get_batch_transfer_status
        get_first_buffer_address get_local_topology get_notifies get_rpc_port initialize
        initialize_ext read_bytes_from_buffer register_memory transfer_check_status
        transfer_submit_write transfer_sync_read transfer_sync_write unregister_memory
        write_bytes_to_buffer
    """,
    "mooncake.ep:Buffer": """
        combine dispatch get_gid get_ipc_handle get_local_lids get_local_qpns get_mr_info
        get_next_combine_buffer ibgda_disabled is_roce p2p_enabled sync_ib sync_ibgda_peers
        sync_nvlink_ipc_handles sync_roce update_local_qpns use_fast_path
    """,
    "mooncake.ep:EventHandle": "current_stream_wait synchronize",
    "mooncake.http_metadata_server:KVBootstrapServer": "close poll run",
    "mooncake.http_metadata_server:KVPoll": """
        Bootstrapping Failed Success Transferring WaitingForInput
    """,
    "mooncake.mooncake_config:MooncakeConfig": "from_file load_from_env",
    "mooncake.mooncake_connector_v1:MooncakeConnector": """
        build_connector_meta get_finished get_num_new_matched_tokens register_kv_caches
        request_finished request_finished_all_groups save_kv_layer start_load_kv
        update_state_after_alloc wait_for_layer_load wait_for_save
    """,
    "mooncake.mooncake_connector_v1:MooncakeConnectorMetadata": "add_new_req",
    "mooncake.mooncake_elastic_buffer:ElasticBuffer": """
        barrier capture combine destroy dispatch get_agrs_buffer_size_hint get_buffer_size_hint
        get_engram_storage_size_hint get_logical_domain_size get_physical_domain_size
        get_pp_buffer_size_hint get_theoretical_num_sms update_ep_member
    """,
    "mooncake.mooncake_ep_buffer:Buffer": """
        combine connect dispatch get_ep_buffer_size_hint get_next_combine_buffer update_ep_member
    """,
    "mooncake.mooncake_ep_buffer:EventOverlap": "current_stream_wait",
    "mooncake.mooncake_ssd_register:MooncakeNoFRegister": "start_ssd_service",
    "mooncake.mooncake_ssd_unregister:MooncakeNoFUnregister": "start_ssd_unregister_service",
    "mooncake.mooncake_store_service:MooncakeStoreService": """
        handle_exist handle_get handle_mount handle_mount_shm handle_put handle_reconfigure
        handle_remove handle_remove_all handle_unmount handle_unmount_local_disk
        handle_unmount_shm start_http_service start_store_service stop
    """,
    "mooncake.shared_segment:SharedSegment": "base_addr tensors total_size",
    "mooncake.spdk_tgt_create:SPDKTgtCreator": "deploy_all_targets deploy_target",
    "mooncake.store:ReplicaStatus": """
        COMPLETE FAILED INITIALIZED PROCESSING REMOVED UNDEFINED
    """,
    "mooncake.structured_object_store:MooncakeBundleTransfer": """
        append_dataproto_fields cleanup_dataproto cleanup_dataproto_append
        dataproto_manifest_view get get_dataproto get_object materialize materialize_into put
        put_bundle put_dataproto put_object put_structured_object read_spec release_result
        remove_bundle
    """,
    "mooncake.structured_object_store:StructuredObjectReadSpec": """
        member_slice select_members slice_member
    """,
}

PARAMETERS: Final[dict[str, str]] = {
    "mooncake.reshard.weight.types:validate_fragment_geometry": """
        tensor fragment_id global_offset local_shape nbytes
    """,
    "mooncake.transfer_engine_topology_dump:dump_te_topology": "device_name",
    "mooncake.transfer_engine_topology_dump:dump_tent_topology": "device_name",
    "mooncake.transfer_engine_topology_dump:resolve_backend": "backend",
    "mooncake.vllm_v1_proxy_server:handle_chat_completions": "request",
    "mooncake.vllm_v1_proxy_server:handle_completions": "request",
    "mooncake.fabric_allocator_utils:get_mooncake_so_path": "so_name import_error_message",
    "mooncake.fabric_allocator_utils:probe_allocator_backend": """
        so_path probe_symbol restype unsupported_value
    """,
    "mooncake.http_metadata_server:KVBootstrapServer": "port host",
    "mooncake.mooncake_connector_v1:get_mooncake_side_channel_port": "vllm_config",
    "mooncake.mooncake_connector_v1:group_concurrent_contiguous": "src_indices dst_indices",
    "mooncake.mooncake_connector_v1:zmq_ctx": "socket_type addr",
    "mooncake.mooncake_store_service:MooncakeStoreService": "config_path cli_config",
    "mooncake.shared_segment:create_shared_segment": """
        name blocks world_size rank_id owner_rank device_id comm_group mmap host_register tp_group
    """,
    "mooncake.shared_segment:shared_segment_supported": "mmap host_register",
    "mooncake.structured_object_store:raw_destination": "ptr size owner pre_registered",
    "mooncake.structured_object_store:tensor_object_buffer": "ptr size owner batch_size",
    "mooncake.vllm_v1_proxy_server:get_next_client": "app service_type",
    "mooncake.vllm_v1_proxy_server:lifespan": "app",
    "mooncake.vllm_v1_proxy_server:send_request_to_service": """
        client_info endpoint req_data request_id
    """,
    "mooncake.vllm_v1_proxy_server:stream_service_response": """
        client_info endpoint req_data request_id
    """,
}
