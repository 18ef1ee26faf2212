"""Searches for stored tensors: requests for the first bytes of objects, answered many at once.

A search is a generator that yields requests. `find_all` carries out many of them in rounds, and
makes one call for the requests of a round.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

from mooncake._api.values import decoded
from mooncake._runtime import _native
from mooncake.errors import (
    DeadlineError,
    InvalidArgumentError,
    MooncakeError,
    NotFoundError,
    NotReadyError,
)
from mooncake.tensor.calls import List, Operation, ReadGrids
from mooncake.tensor.format import (
    MANIFEST_BYTES,
    METADATA_BYTES,
    FormatError,
    Manifest,
    TensorMetadata,
)
from mooncake.tensor.layout import Box

__all__ = [
    "Evidence",
    "Found",
    "Head",
    "Heads",
    "Names",
    "Part",
    "Search",
    "State",
    "Unsettled",
    "as_text",
    "decoded_head",
    "decoded_manifest",
    "find_all",
    "invalid",
    "list_names",
    "listed",
    "missing",
    "mixed",
    "read_heads",
]

_NOT_FOUND = -704
_NOT_READY = -703
_INVALID_PARAMS = -600
_LISTED_MAX = 8
"""Maximum number of keys in the text of an error."""

_HEADS_ATTEMPTS = 8
"""Number of times that heads are read, if one of the objects is replaced during each of them."""

_BYTES_REMEDY = "If the object is no tensor, get or get_buffer return its bytes."


State: TypeAlias = tuple[object, ...]
"""What a search saw of the stored objects: their versions, and the names that it listed.

Nothing of it was replaced or removed between two searches that saw the same.
"""


class Head(NamedTuple):
    """The beginning of an object.

    Attributes:
        data: Its first bytes, ``b""`` if it is shorter; None without an object; or the failure.
        version: Version of the object; None if it is not known.
        generation: Which call has written it; "" if it does not say.
    """

    data: bytes | MooncakeError | None
    version: int | None = None
    generation: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """A stored object that holds a part of a tensor.

    Attributes:
        key: Key of the object.
        head: The first bytes of the object, as they were when it was found.
        metadata: The decoded head.
        box: The part of the tensor.
    """

    key: bytes
    head: bytes
    metadata: TensorMetadata
    box: Box


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a search saw of one object.

    Attributes:
        key: Key of the object.
        length: Number of bytes that were read.
        head: These bytes; None without an object, ``b""`` for a shorter one.
    """

    key: bytes
    length: int
    head: bytes | None

    def is_confirmed(self, outcome: int | MooncakeError, head: bytes | bytearray) -> bool:
        """Return whether a later read of the same bytes saw the same."""
        if self.head is None:
            return isinstance(outcome, NotFoundError | NotReadyError)
        if not self.head:
            return isinstance(outcome, InvalidArgumentError)
        return not isinstance(outcome, MooncakeError) and head == self.head


@dataclass(frozen=True, slots=True)
class Found:
    """The objects from which a wanted part of a tensor can be read.

    Attributes:
        key: Key of the tensor.
        wanted: The wanted part.
        parts: The objects that hold it.
        evidence: What the search saw: as long as it is the same, another search finds the same.
            None if that cannot be checked by reading objects.
        state: The versions of what it saw.
    """

    key: bytes
    wanted: Box
    parts: tuple[Part, ...]
    evidence: tuple[Evidence, ...] | None = None
    state: State = field(default=(), compare=False)

    @property
    def metadata(self) -> TensorMetadata:
        """Metadata of one of the parts; all have the same dtype and global shape."""
        return self.parts[0].metadata


class Unsettled(Exception):  # noqa: N818 - it says that a search should be repeated
    """A search saw objects that do not fit together, perhaps since they are being replaced.

    Attributes:
        error: The failure, if that does not change.
        is_mixed: The objects are of different versions of the tensor; else objects are missing.
        state: The versions of what the search saw.
    """

    def __init__(self, error: MooncakeError, *, is_mixed: bool) -> None:
        """Take the failure and its reason."""
        super().__init__(str(error))
        self.error = error
        self.is_mixed = is_mixed
        self.state: State = ()


@dataclass(frozen=True, slots=True)
class Heads:
    """A request for the first bytes of objects and of manifests; None for one that is missing."""

    keys: list[bytes]
    manifests: tuple[bytes, ...] = ()

    def evidence(self, heads: Sequence[bytes | None]) -> list[Evidence]:
        """Return the answers as evidence."""
        names = [*self.keys, *self.manifests]
        lengths = [METADATA_BYTES] * len(self.keys) + [MANIFEST_BYTES] * len(self.manifests)
        return list(map(Evidence, names, lengths, heads))


@dataclass(frozen=True, slots=True)
class Names:
    """A request for the keys that have a prefix."""

    prefix: bytes


Search: TypeAlias = Generator[Heads | Names, Any, Found]
"""A search for the objects of one tensor: yields requests, receives their answers."""


def find_all(
    searches: Sequence[Search], *, lease: bool
) -> Operation[list[Found | MooncakeError | Unsettled]]:
    """Carry out searches; the requests of all of them go out together, round by round.

    Args:
        searches: The searches.
        lease: Lease the objects whose first bytes are read.
    """
    results: list[Found | MooncakeError | Unsettled | None] = [None] * len(searches)
    running = dict(enumerate(searches))
    answers: dict[int, Any] = dict.fromkeys(running)
    seen: dict[int, list[Evidence] | None] = {at: [] for at in running}
    states: dict[int, list[object]] = {at: [] for at in running}
    writing: dict[int, MooncakeError] = {}
    while running:
        wanted: dict[int, Heads | Names] = {}
        for at, search in list(running.items()):
            try:
                wanted[at] = search.send(answers[at])
            except StopIteration as end:
                results[at] = _with_evidence(end.value, seen[at], states[at])
            except Unsettled as error:
                # Shards that are missing may be those that are being put for the first time.
                first_put = None if error.is_mixed else writing.get(at)
                unsettled = Unsettled(first_put, is_mixed=True) if first_put else error
                unsettled.state = tuple(states[at])
                results[at] = unsettled
            except NotFoundError as error:
                results[at] = writing.get(at, error)
            except MooncakeError as error:
                results[at] = error
            if at not in wanted:
                del running[at]
        answers = yield from _answer(wanted, writing, states, lease=lease)
        for at, answer in answers.items():
            if isinstance(answer, MooncakeError):
                results[at] = answer
                del running[at]
                continue
            request, evidence = wanted[at], seen[at]
            if isinstance(request, Names) or evidence is None:
                seen[at] = None
            else:
                evidence += request.evidence(answer)
    return [result for result in results if result is not None]


def read_heads(
    keys: Sequence[bytes], manifests: Sequence[bytes] = (), *, lease: bool = False, tag: str = ""
) -> Operation[list[Head]]:
    """Return the first bytes of objects, as one call saw them.

    Args:
        keys: Keys of tensors and shards.
        manifests: Keys of manifests; their heads follow those of `keys`.
        lease: Lease the objects.
        tag: `GENERATION_TAG` to learn which call has written each object.
    """
    names = [*keys, *manifests]
    if not names:
        return []
    lengths = [METADATA_BYTES] * len(keys) + [MANIFEST_BYTES] * len(manifests)
    starts = list(accumulate(lengths, initial=0))
    memory = bytearray(starts.pop())
    base, _ = _native.writable_range(memory)
    grids = [[(base + start, 0, length, ())] for start, length in zip(starts, lengths, strict=True)]
    texts = [decoded(name) for name in names]
    for _ in range(_HEADS_ATTEMPTS):
        outcomes = yield ReadGrids(texts, grids, memory, lease=lease, tag=tag)
        if not any(isinstance(outcome, DeadlineError) for outcome in outcomes):
            break
    heads: list[Head] = []
    for start, length, outcome in zip(starts, lengths, outcomes, strict=True):
        if isinstance(outcome, NotFoundError):
            heads.append(Head(None))
        elif isinstance(outcome, InvalidArgumentError):
            heads.append(Head(b""))
        elif isinstance(outcome, MooncakeError):
            heads.append(Head(outcome))
        else:
            heads.append(Head(bytes(memory[start : start + length]), *outcome[1:]))
    return heads


def list_names(prefix: bytes) -> Operation[list[bytes]]:
    """Return the keys of the complete objects that have a prefix."""
    names: list[bytes] = []
    after: bytes | None = None
    while True:
        page, is_last = yield List(prefix, after)
        names += [name for name, _, is_complete, *_ in page if is_complete]
        if is_last or not page:
            return names
        after = page[-1][0]


def decoded_head(key: bytes, head: bytes) -> TensorMetadata:
    """Decode the metadata of an object."""
    if not head:
        text = f"not a tensor object: it is shorter than {METADATA_BYTES} bytes of metadata"
        raise invalid(key, text, _BYTES_REMEDY)
    try:
        return TensorMetadata.decode(head)
    except FormatError as error:
        raise invalid(key, str(error), _BYTES_REMEDY) from None


def decoded_manifest(key: bytes, head: bytes) -> Manifest:
    """Decode a manifest."""
    try:
        return Manifest.decode(head)
    except FormatError as error:
        raise invalid(key, str(error)) from None


def invalid(key: bytes, text: str, remedy: str | None = None) -> MooncakeError:
    """Return the error for a tensor that cannot be read or written as asked."""
    return _native.failure(_INVALID_PARAMS, text, key=decoded(key), remedy=remedy)


def missing(key: bytes, names: Sequence[bytes]) -> Unsettled:
    """Return the outcome for a tensor of which objects do not exist."""
    text = f"shards of the tensor are missing: {listed(names)}"
    return Unsettled(_native.failure(_NOT_FOUND, text, key=decoded(key)), is_mixed=False)


def mixed(key: bytes, versions: Sequence[str]) -> MooncakeError:
    """Return the error for shards of different versions of a tensor."""
    return _native.failure(
        _NOT_READY,
        "the stored shards are of different versions of the tensor",
        key=decoded(key),
        context={"versions": ", ".join(versions)},
        remedy="Wait for the writer that replaces the tensor; if it died, put the tensor again.",
    )


def listed(names: Sequence[bytes]) -> str:
    """Return keys as text, the first few of many."""
    text = ", ".join(map(as_text, names[:_LISTED_MAX]))
    return text if len(names) <= _LISTED_MAX else f"{text} and {len(names) - _LISTED_MAX} more"


def as_text(key: bytes) -> str:
    """Return a key for the text of an error."""
    return key.decode(errors="replace")


def _with_evidence(found: Found, seen: list[Evidence] | None, state: list[object]) -> Found:
    """Add the versions that were seen, and what was seen of other objects than the parts.

    The heads of the parts are checked by every read.
    """
    if seen is not None:
        parts = {part.key for part in found.parts}
        found = replace(found, evidence=tuple(each for each in seen if each.key not in parts))
    return replace(found, state=tuple(state))


def _answer(
    wanted: dict[int, Heads | Names],
    writing: dict[int, MooncakeError],
    states: dict[int, list[object]],
    *,
    lease: bool,
) -> Operation[dict[int, Any]]:
    """Answer the requests of one round.

    Args:
        wanted: The requests.
        writing: Receives the failure of a search that finds an object which is being put for the
            first time.
        states: Receives the versions of what each search sees.
        lease: Lease the objects.
    """
    answers: dict[int, Any] = {}
    requests = {at: request for at, request in wanted.items() if isinstance(request, Heads)}
    keys = [key for request in requests.values() for key in request.keys]
    manifests = [key for request in requests.values() for key in request.manifests]
    outcomes = yield from read_heads(keys, manifests, lease=lease)
    heads, of_manifests = iter(outcomes[: len(keys)]), iter(outcomes[len(keys) :])
    for at, request in requests.items():
        rows = [next(heads) for _ in request.keys]
        rows += [next(of_manifests) for _ in request.manifests]
        states[at] += [row.version for row in rows]
        own = [row.data for row in rows]
        for index, each in enumerate(own):
            if isinstance(each, NotReadyError):
                writing[at], own[index] = each, None
        failed = (each for each in own if isinstance(each, MooncakeError))
        answers[at] = next(failed, own)
    for at, other in wanted.items():
        if isinstance(other, Names):
            answers[at] = yield from list_names(other.prefix)
            states[at] += answers[at]
    return answers
