"""Upstream's module of structured objects: the names of `mooncake.structured`."""

from __future__ import annotations

from mooncake.structured.bundle import DEFAULT_BUNDLE_CHUNK_BYTES
from mooncake.structured.bundle_store import MISSING_OBJECT_ERROR, BundleStore
from mooncake.structured.columns.leaf import MISSING, FieldSchema
from mooncake.structured.columns.tree import infer_structure
from mooncake.structured.destinations import raw_destination, tensor_object_buffer
from mooncake.structured.manifest import RemoteBundleRef
from mooncake.structured.members import STRUCTURED_FIELD_SPECS_KEY
from mooncake.structured.policy import (
    AUTO_PARALLEL_MIN_BYTES,
    AUTO_PARALLEL_MIN_CHUNKS,
    BundleTransferPolicy,
)
from mooncake.structured.references import (
    DATAPROTO_REF_HANDLE_TYPE,
    DATAPROTO_REF_HANDLE_VERSION,
    STORAGE_GROUP_ID,
    DataProtoRefLike,
    MooncakeDataProtoRef,
    StructuredFieldLocation,
    export_dataproto_ref,
    import_dataproto_ref,
    is_dataproto_ref_handle,
)
from mooncake.structured.rows import StructuredMemberSlice
from mooncake.structured.structured_object import (
    StructuredObjectPayload,
    StructuredObjectReadSpec,
    StructuredObjectResult,
)
from mooncake.structured.transfer import MooncakeBundleTransfer

__all__ = [
    "AUTO_PARALLEL_MIN_BYTES",
    "AUTO_PARALLEL_MIN_CHUNKS",
    "DATAPROTO_REF_HANDLE_TYPE",
    "DATAPROTO_REF_HANDLE_VERSION",
    "DEFAULT_BUNDLE_CHUNK_BYTES",
    "MISSING",
    "MISSING_OBJECT_ERROR",
    "STORAGE_GROUP_ID",
    "STRUCTURED_FIELD_SPECS_KEY",
    "BundleStore",
    "BundleTransferPolicy",
    "DataProtoRefLike",
    "FieldSchema",
    "MooncakeBundleTransfer",
    "MooncakeDataProtoRef",
    "RemoteBundleRef",
    "StructuredFieldLocation",
    "StructuredMemberSlice",
    "StructuredObjectPayload",
    "StructuredObjectReadSpec",
    "StructuredObjectResult",
    "export_dataproto_ref",
    "export_ref",
    "import_dataproto_ref",
    "import_ref",
    "infer_structure",
    "is_dataproto_ref_handle",
    "raw_destination",
    "tensor_object_buffer",
]

export_ref = export_dataproto_ref
import_ref = import_dataproto_ref
