"""Random calls of a DataProto catalog, and its answers as JSON lines.

Usage: catalog_calls.py COUNT. One line per seed, equal for equal behaviour; runs with whichever
package the interpreter has.
"""

from __future__ import annotations

import copy
import json
import random
import sys
from typing import Any

from dataproto_handles import appended, handle

from mooncake.dataproto_catalog import DataProtoCatalog

STEPS = 60
WEIGHTS = {
    "update": 2,
    "publish": 6,
    "repeat": 2,
    "append": 5,
    "resolve": 6,
    "release": 4,
    "remove": 3,
    "acknowledge": 2,
    "delete": 3,
    "list": 1,
    "drain": 0.15,
}


class Caller:
    """Calls a catalog at random, so that later calls refer to earlier ones."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.catalog = DataProtoCatalog()
        self.handles: dict[str, dict[str, Any]] = {}
        self.published: list[tuple[Any, ...]] = []
        self.tokens = [1]
        self.retired: list[dict[str, Any]] = []

    def answers(self) -> list[Any]:
        found = []
        for step in range(STEPS):
            call = self.rng.choices([*WEIGHTS], [*WEIGHTS.values()])[0]
            try:
                answer = getattr(self, call)(step)
            except (RuntimeError, TypeError, ValueError) as error:
                found.append([call, type(error).__name__, str(error)])
                continue
            except KeyError:
                # Upstream fails so for a fragment that only reads refer to; the rest is undefined.
                return [*found, ["KeyError"]]
            if isinstance(answer, dict) and "retired_handles" in answer:
                answer["retired_handles"].sort(key=json.dumps)
                self.retired = copy.deepcopy(answer["retired_handles"])
            found.append([call, answer])
        return found

    def names(self) -> list[str]:
        return self.rng.sample([f"k{number}" for number in range(6)], self.rng.randint(1, 3))

    def partition(self) -> str:
        return self.rng.choice("pppq")

    def content(self, step: int, partition: str, names: list[str]) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.rng.random() < 0.2 and self.handles:
            options["handle"] = copy.deepcopy(self.rng.choice([*self.handles.values()]))
        elif self.rng.random() < 0.8:
            rows = len(names) if self.rng.random() < 0.95 else 9
            fields = "".join(self.rng.sample("abcd", self.rng.randint(1, 3)))
            meta_info = {"m": self.rng.randrange(2)} if self.rng.random() < 0.3 else {}
            options["handle"] = handle(f"A{step}", rows, fields, partition, meta_info=meta_info)
        if self.rng.random() < 0.4:
            options["tags"] = [{self.rng.choice("xy"): self.rng.randrange(5)} for _ in names]
        return options

    def update(self, step: int) -> Any:
        partition, names = self.partition(), self.names()
        options = self.content(step, partition, names)
        answer = self.catalog.update(partition, names, **options)
        self.remember(options)
        return answer

    def publish(self, step: int) -> Any:
        partition, names = self.partition(), self.names()
        options = self.content(step, partition, names)
        answer = self.catalog.publish(f"o{step}", partition, names, **options)
        self.remember(options)
        self.published.append((f"o{step}", partition, names, options))
        return answer

    def remember(self, options: dict[str, Any]) -> None:
        if "handle" in options:
            self.handles[options["handle"]["stage_refs"]["default"]["manifest_key"]] = options[
                "handle"
            ]

    def repeat(self, step: int) -> Any:
        if not self.published:
            return None
        operation, partition, names, options = self.rng.choice(self.published)
        return self.catalog.publish(operation, partition, names, **options)

    def append(self, step: int) -> Any:
        recent = [item for item in self.published[-4:] if "handle" in item[3]]
        if not recent:
            return None
        _, partition, names, options = self.rng.choice(recent)
        fragment_id = options["handle"]["stage_refs"]["default"]["manifest_key"]
        previous = self.handles[fragment_id]
        following = appended(previous, f"s{step}", f"field of {step}")
        if self.rng.random() < 0.1:
            names = self.names()
        if self.rng.random() < 0.1:
            following["storage_group_id"] = "another"
        answer = self.catalog.publish_append(
            f"a{step}", fragment_id, partition, names, previous_handle=previous, handle=following
        )
        if "append_rejected" not in answer:
            self.handles[fragment_id] = following
        return answer

    def resolve(self, step: int) -> Any:
        fields = self.rng.choice([None, None, ["a"], ["b", "a"]])
        pin = self.rng.random() < 0.5
        answer = self.catalog.resolve(self.partition(), self.names(), fields, pin=pin)
        if pin:
            self.tokens.append(answer["read_token"])
        return answer

    def release(self, step: int) -> Any:
        return self.catalog.release_read(self.rng.choice(self.tokens))

    def remove(self, step: int) -> Any:
        return self.catalog.remove(self.partition(), self.names())

    def acknowledge(self, step: int) -> Any:
        operation = self.rng.choice(self.published)[0] if self.published else "none"
        return self.catalog.ack_publication(operation)

    def delete(self, step: int) -> Any:
        chosen = self.rng.sample(self.retired, self.rng.randint(0, len(self.retired)))
        return self.catalog.ack_retired(chosen)

    def list(self, step: int) -> Any:
        return self.catalog.list(self.rng.choice([None, "p"]))

    def drain(self, step: int) -> Any:
        return self.catalog.drain()


if __name__ == "__main__":
    for seed in range(int(sys.argv[1])):
        print(json.dumps(Caller(seed).answers(), sort_keys=True))
