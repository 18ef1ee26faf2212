"""The manifest of a checkpoint: a JSON text that names every part, described in the reference."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from mooncake.checkpoint.names import CORRUPT, INVALID, NOT_FOUND, Keys, error_of
from mooncake.checkpoint.nodes import Node, checked_tree
from mooncake.errors import MooncakeError, NotFoundError, NotSupportedError
from mooncake.tensor.dtypes import DType

__all__ = ["Manifest", "Part", "Tensor", "lost_part", "missing", "read_manifest", "read_text"]

FORMAT: Final = "mooncake.checkpoint"
VERSION: Final = 1
NOT_SUPPORTED: Final = -1012
_OVERLAPS_CHECKED = 1024
_DESCRIBED_MAX = 1024
_CHECKSUM = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Part:
    """An object with a box of a tensor, in row-major order and without anything else.

    Attributes:
        name: Name of the object below the prefix.
        offset: First index of the box in each dimension.
        shape: Length of the box in each dimension.
        nbytes: Length of the object.
        version: Version of the object.
        xxh3: Checksum of the bytes, 64-bit XXH3; None without one.
    """

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    nbytes: int
    version: int
    xxh3: int | None = None


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a checkpoint.

    Attributes:
        name: Path of the tensor in the state dict, for people and for `safe_open`.
        dtype: Type of the elements.
        shape: Length of each dimension.
        parts: Boxes that make up the tensor; none if it has no elements.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Length of the elements in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that is known of a checkpoint.

    Attributes:
        save: Id of the save that wrote it.
        tree: The state dict, with the numbers of tensors in their places.
        tensors: The tensors.
        blobs: Bytes by name, which a planner of torch wrote; the offset and shape are those of a
            row of bytes.
        planner: Data of that planner.
        metadata: Text by name, as safetensors files have it.
        version: Version of the object of the manifest; 0 before it is stored.
    """

    save: str
    tree: Node
    tensors: tuple[Tensor, ...]
    blobs: dict[str, Part] = field(default_factory=dict)
    planner: Node = None
    metadata: dict[str, str] = field(default_factory=dict)
    version: int = 0

    @property
    def nbytes(self) -> int:
        """Length of all parts in bytes."""
        return sum(part.nbytes for part in self.parts())

    def parts(self) -> Iterable[Part]:
        """Iterate over all parts."""
        for tensor in self.tensors:
            yield from tensor.parts
        yield from self.blobs.values()

    def owners(self) -> Iterable[tuple[str, Part]]:
        """Iterate over all parts, each with the name of its tensor."""
        for tensor in self.tensors:
            for part in tensor.parts:
                yield tensor.name, part
        yield from self.blobs.items()

    def tensor(self, name: str) -> Tensor:
        """Return the tensor with a name.

        Raises:
            NotFoundError: There is none.
        """
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise error_of(NOT_FOUND, "the checkpoint has no such tensor", tensor=name)

    def encode(self) -> bytes:
        """Return the JSON text."""
        document = {
            "format": FORMAT,
            "version": VERSION,
            "save": self.save,
            "nbytes": self.nbytes,
            "tensors": [
                {
                    "name": tensor.name,
                    "dtype": tensor.dtype.name,
                    "shape": tensor.shape,
                    "parts": [_encode_part(part) for part in tensor.parts],
                }
                for tensor in self.tensors
            ],
            "blobs": {name: _encode_part(part) for name, part in self.blobs.items()},
            "planner": self.planner,
            "metadata": self.metadata,
            "tree": self.tree,
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes, keys: Keys, version: int = 0) -> Manifest:
        """Read a manifest and check all of it.

        Raises:
            CorruptError: The text is damaged, is no manifest, or contradicts itself.
            NotSupportedError: A newer release wrote it.
        """
        try:
            document = json.loads(data)
            if not isinstance(document, dict) or document.get("format") != FORMAT:
                raise ValueError("the object is no manifest of a checkpoint")
            if document["version"] != VERSION:
                text = "a newer release wrote the checkpoint; load it with that one"
                found = {"version": document["version"], "known": VERSION}
                raise error_of(NOT_SUPPORTED, text, key=keys.manifest, **found)
            made = cls(
                _text(document["save"]),
                document["tree"],
                tuple(_decode_tensor(each, keys) for each in document["tensors"]),
                {_text(name): _decode_part(each, keys) for name, each in document["blobs"].items()},
                document["planner"],
                {_text(name): _text(text) for name, text in document["metadata"].items()},
                version,
            )
            checked_tree(made.tree, len(made.tensors), made.blobs)
            checked_tree(made.planner, 0, ())
            names = [tensor.name for tensor in made.tensors]
            if len({*names}) != len(names):
                raise ValueError("two tensors have the same name")
            if document["nbytes"] != made.nbytes:
                raise ValueError("the lengths of the parts do not add up")
        except NotSupportedError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            text = f"the manifest is damaged or foreign: {error!s:.200}"
            raise error_of(CORRUPT, text, key=keys.manifest) from error
        return made


def read_manifest(native: Any, keys: Keys) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        NotFoundError: There is no such checkpoint.
        CorruptError: The manifest is damaged.
    """
    text, version = read_text(native, keys)
    return Manifest.decode(text, keys, version)


def read_text(native: Any, keys: Keys) -> tuple[bytes, int]:
    """Read the text of a manifest and its version.

    Raises:
        NotFoundError: There is no such checkpoint.
    """
    (located,) = native.locate([keys.manifest], lease=False)
    if isinstance(located, NotFoundError):
        raise missing(keys)
    if isinstance(located, MooncakeError):
        raise located
    return native.read_located(located, 0, located.size), located.version


def lost_part(native: Any, keys: Keys, manifest: Manifest) -> tuple[str, str] | None:
    """Return the tensor and the key of a part that is not stored with its version; None if all are.

    Raises:
        MooncakeError: The master could not be asked.
    """
    parts = [*manifest.owners()]
    for at in range(0, len(parts), _DESCRIBED_MAX):
        batch = parts[at : at + _DESCRIBED_MAX]
        described = native.describe([keys.of(part.name) for _, part in batch])
        for (name, part), known in zip(batch, described, strict=True):
            if isinstance(known, MooncakeError) and not isinstance(known, NotFoundError):
                raise known
            if isinstance(known, MooncakeError) or known["version"] != part.version:
                return name, keys.of(part.name)
    return None


def missing(keys: Keys) -> MooncakeError:
    """Return the error for a checkpoint that does not exist."""
    return error_of(
        NOT_FOUND,
        "there is no checkpoint of that name",
        remedy="mooncake.checkpoint.list and `mooncake checkpoint ls` show those there are.",
        prefix=keys.prefix,
    )


def _encode_part(part: Part) -> dict[str, Any]:
    made = {
        "object": part.name,
        "offset": part.offset,
        "shape": part.shape,
        "nbytes": part.nbytes,
        "version": part.version,
    }
    return made if part.xxh3 is None else {**made, "xxh3": f"{part.xxh3:016x}"}


def _decode_part(each: dict[str, Any], keys: Keys) -> Part:
    name = _text(each["object"])
    keys.of(name)
    xxh3 = each.get("xxh3")
    return Part(
        name,
        _numbers(each["offset"]),
        _numbers(each["shape"]),
        _number(each["nbytes"]),
        _number(each["version"]),
        None if xxh3 is None else _checksum(xxh3),
    )


def _decode_tensor(each: dict[str, Any], keys: Keys) -> Tensor:
    parts = tuple(_decode_part(part, keys) for part in each["parts"])
    dtype, shape = DType.of_name(_text(each["dtype"])), _numbers(each["shape"])
    tensor = Tensor(_text(each["name"]), dtype, shape, parts)
    check_boxes(tensor.name, shape, [(part.offset, part.shape) for part in parts])
    for part in parts:
        if part.nbytes != math.prod(part.shape) * dtype.itemsize:
            raise ValueError(f"a part of {tensor.name!r} has a wrong length")
    return tensor


def check_boxes(
    name: str, shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    """Refuse boxes that do not make up a tensor.

    Raises:
        InvalidArgumentError: They leave the tensor, overlap, or do not cover it.
    """
    for offset, own in boxes:
        if len(offset) != len(shape) or len(own) != len(shape):
            raise error_of(INVALID, "a part has another number of dimensions", tensor=name)
        ends = zip(offset, own, shape, strict=True)
        if any(start + length > limit for start, length, limit in ends):
            raise error_of(INVALID, "a part leaves its tensor", tensor=name, shape=shape)
    if sum(math.prod(own) for _, own in boxes) != math.prod(shape):
        text = "the parts do not make up the tensor: a rank's shard is missing, or shards overlap"
        raise error_of(INVALID, text, tensor=name, shape=shape)
    # The volumes agree, so that a gap is an overlap elsewhere. Many boxes would take long.
    if len(boxes) <= _OVERLAPS_CHECKED:
        for at, (start, own) in enumerate(boxes):
            for other, length in boxes[:at]:
                spans = zip(start, own, other, length, strict=True)
                if all(a < c + d and c < a + b for a, b, c, d in spans):
                    raise error_of(INVALID, "two parts overlap", tensor=name, shape=shape)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"text was expected, not {value!r:.60}")
    return value


def _checksum(value: object) -> int:
    text = _text(value)
    if _CHECKSUM.fullmatch(text) is None:
        raise ValueError(f"a checksum was expected, not {value!r:.60}")
    return int(text, 16)


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"a number was expected, not {value!r:.60}")
    return value


def _numbers(values: object) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise ValueError(f"a list of numbers was expected, not {values!r:.60}")
    return tuple(_number(value) for value in values)
