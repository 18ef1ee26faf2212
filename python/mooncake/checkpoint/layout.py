"""Which rank writes which box of which tensor, from what all ranks hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mooncake.checkpoint.local import Box
from mooncake.checkpoint.manifest import Manifest, Part, Tensor, check_boxes
from mooncake.checkpoint.names import INVALID, error_of, part_name
from mooncake.checkpoint.nodes import merge
from mooncake.tensor.dtypes import DType

__all__ = ["Layout", "Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """A box that one rank writes.

    Attributes:
        tensor: Number of the tensor in the manifest.
        box: The box.
        nbytes: Its length in bytes.
        rank: The rank that writes it.
        source: Numbers of the tensor and of the block at that rank.
    """

    tensor: int
    box: Box
    nbytes: int
    rank: int
    source: tuple[int, int]


class Layout:
    """The tensors of all ranks as one state dict. Every rank comes to the same result.

    Attributes:
        places: The boxes, by number of the part.
    """

    def __init__(self, documents: Sequence[dict[str, Any]]) -> None:
        """Unite what ranks hold.

        Args:
            documents: `LocalTensors.document` of each rank.

        Raises:
            InvalidArgumentError: The ranks contradict each other; the message names the tensor.
        """
        self.places: list[Place] = []
        self._documents = documents
        self._known: dict[tuple[tuple[int, int], ...], int] = {}
        self._heads: list[tuple[str, DType, tuple[int, ...]]] = []
        self._load = [0] * len(documents)
        self._tree = merge([(r, each["tree"]) for r, each in enumerate(documents)], self._add)
        names: dict[str, int] = {}
        for at, (name, dtype, shape) in enumerate(self._heads):
            times = names[name] = names.get(name, 0) + 1
            self._heads[at] = (name if times == 1 else f"{name}~{times}", dtype, shape)

    @property
    def nbytes(self) -> int:
        """Length of all parts in bytes."""
        return sum(place.nbytes for place in self.places)

    def names(self, save: str) -> list[str]:
        """Return the names of the parts in a save with an id."""
        return [
            part_name(save, at, self._heads[place.tensor][0])
            for at, place in enumerate(self.places)
        ]

    def manifest(
        self,
        save: str,
        stored: dict[int, tuple[str, int, int | None]],
        metadata: dict[str, str],
    ) -> Manifest:
        """Return the manifest.

        Args:
            save: Id of the save.
            stored: Name, version and checksum of each part.
            metadata: Text by name.
        """
        parts: list[list[Part]] = [[] for _ in self._heads]
        for at, place in enumerate(self.places):
            name, version, xxh3 = stored[at]
            parts[place.tensor].append(Part(name, *place.box, place.nbytes, version, xxh3))
        tensors = [Tensor(*head, tuple(own)) for head, own in zip(self._heads, parts, strict=True)]
        return Manifest(save, self._tree, tuple(tensors), metadata=metadata)

    def _add(self, own: Sequence[tuple[int, int]]) -> int:
        """Return the number of a tensor, given ranks and the numbers it has there."""
        identity = tuple(own)
        if identity in self._known:
            return self._known[identity]
        found = [(rank, at, self._documents[rank]["tensors"][at]) for rank, at in own]
        first = found[0][2]
        for rank, _, each in found:
            if (each["dtype"], [*each["shape"]]) != (first["dtype"], [*first["shape"]]):
                text = "ranks have tensors of different shapes or dtypes in one place"
                raise error_of(
                    INVALID,
                    text,
                    tensor=first["name"],
                    first=f"{first['dtype']}{[*first['shape']]}",
                    other=f"{each['dtype']}{[*each['shape']]}",
                    rank=rank,
                )
        number, dtype = len(self._heads), DType.of_name(first["dtype"])
        shape = tuple(first["shape"])
        holders: dict[Box, list[tuple[int, int, int]]] = {}
        for rank, at, each in found:
            for block, (offset, lengths) in enumerate(each["boxes"]):
                if math.prod(lengths):
                    box = tuple(offset), tuple(lengths)
                    holders.setdefault(box, []).append((rank, at, block))
        check_boxes(first["name"], shape, [*holders])
        self._heads.append((first["name"], dtype, shape))
        self._known[identity] = number
        for box, ranks in holders.items():
            rank, at, block = min(ranks, key=lambda each: (self._load[each[0]], each[0]))
            nbytes = math.prod(box[1]) * dtype.itemsize
            self._load[rank] += nbytes
            self.places.append(Place(number, box, nbytes, rank, (at, block)))
        return number
