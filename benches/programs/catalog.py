"""Measures look-ups of 1,000 keys in a DataProto catalog of 1,000,000 rows.

    VENV/bin/python benches/programs/catalog.py

The rows are published in fragments of 1,000: without tags, with one tag for each fragment, and with
a tag for each key. The keys of a look-up are chosen at random, so that they are in no cache. The
second time is that of a look-up whose tags are all read. The extension has to be optimised.
"""

from __future__ import annotations

import random
import statistics
import time

from mooncake.dataproto_catalog import DataProtoCatalog

ROWS = 1_000_000
FRAGMENT_ROWS = 1000
KEYS = 1000
LOOK_UPS = 200
FIELDS = ("input_ids", "attention_mask", "responses")


def handle(number: int) -> dict[str, object]:
    """Return the handle of a fragment."""
    return {
        "type": "mooncake_dataproto_ref",
        "version": 1,
        "kind": "bundle_stages",
        "batch_size": FRAGMENT_ROWS,
        "stage_refs": {"default": {"manifest_key": f"catalog/default/{number:032x}/manifest"}},
        "field_index": {
            name: {"stage": "default", "member": f"batch.{name}", "section": "batch"}
            for name in FIELDS
        },
    }


def filled(tags: str) -> DataProtoCatalog:
    """Return a catalog with all rows."""
    catalog = DataProtoCatalog()
    for number in range(ROWS // FRAGMENT_ROWS):
        rows = range(number * FRAGMENT_ROWS, (number + 1) * FRAGMENT_ROWS)
        given = {
            "none": None,
            "one": [{"step": number} for _ in rows],
            "each": [{"step": number, "row": row} for row in rows],
        }
        keys = [f"sample-{row}" for row in rows]
        catalog.publish(f"{number}", "train", keys, tags=given[tags], handle=handle(number))
        catalog.ack_publication(f"{number}")
    return catalog


def main() -> None:
    """Print the median times of each kind of tags."""
    print("| Tags | publish 1,000 rows | look-up of 1,000 keys | with their tags read |")
    print("|---|---|---|---|")
    rng = random.Random(1)
    for tags in ("none", "one", "each"):
        started = time.perf_counter()
        catalog = filled(tags)
        publish_ms = (time.perf_counter() - started) * 1e3 / (ROWS // FRAGMENT_ROWS)
        bare_ms, whole_ms = [], []
        for _ in range(LOOK_UPS):
            keys = [f"sample-{row}" for row in rng.sample(range(ROWS), KEYS)]
            started = time.perf_counter()
            answer = catalog.resolve("train", keys)
            bare_ms.append((time.perf_counter() - started) * 1e3)
            answer["tags"] = list(answer["tags"])
            whole_ms.append((time.perf_counter() - started) * 1e3)
        medians = (publish_ms, statistics.median(bare_ms), statistics.median(whole_ms))
        print(f"| {tags} | " + " | ".join(f"{each:.2f} ms" for each in medians) + " |")


if __name__ == "__main__":
    main()
