"""Handles of stored DataProto batches, as `export_dataproto_ref` makes them, for tests."""

from __future__ import annotations

import copy
from typing import Any


def handle(
    name: str, rows: int = 2, fields: str = "ab", partition: str = "p", **changes: Any
) -> dict[str, Any]:
    """A handle of a batch with one stage, as `export_dataproto_ref` makes it."""
    return {
        "type": "mooncake_dataproto_ref",
        "version": 1,
        "kind": "bundle_stages",
        "batch_size": rows,
        "namespace": "default",
        "partition": partition,
        "global_indexes": None,
        "stage_refs": {"default": {"manifest_key": name}},
        "field_index": {
            field: {"stage": "default", "member": f"batch.{field}", "section": "batch"}
            for field in fields
        },
        "meta_info": {},
        "encoded_non_tensor": {},
        "storage_group_id": f"group of {name}",
        **changes,
    }


def appended(previous: dict[str, Any], stage: str, field: str) -> dict[str, Any]:
    """The handle after one field was stored as a new stage."""
    longer = copy.deepcopy(previous)
    longer["stage_refs"][stage] = {"manifest_key": f"manifest of {stage}"}
    longer["field_index"][field] = {"stage": stage, "member": f"batch.{field}", "section": "batch"}
    return longer
