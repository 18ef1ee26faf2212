"""`save`: parts first, the manifest last, then the parts of earlier saves are removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from mooncake._api.async_store import AsyncStore
from mooncake._api.keywords import suggesting
from mooncake._api.store import Store
from mooncake.checkpoint.inventory import Checkpoint
from mooncake.checkpoint.journal import JOURNAL, journal, suffix_of
from mooncake.checkpoint.layout import Layout
from mooncake.checkpoint.local import LocalTensors
from mooncake.checkpoint.names import (
    Keys,
    native_of,
)
from mooncake.checkpoint.publication import Pin, Publication
from mooncake.checkpoint.ranks import Ranks
from mooncake.checkpoint.room import pool_full
from mooncake.checkpoint.safetensors import FileMemory, FileTensors
from mooncake.checkpoint.transfer import (
    Source,
    batched,
    checksum_threads,
    put_options,
    xxh3_of,
)
from mooncake.errors import (
    DeadlineError,
    MooncakeError,
    NoSpaceError,
    TransferFailedError,
    UnavailableError,
)

__all__ = ["Terms", "put_parts", "save", "save_local"]

Stored: TypeAlias = dict[int, tuple[str, int, int | None]]
"""Name, version and checksum of parts by their number."""

# What is stored when one of these ends a save is of use to the next one.
_LOST = (UnavailableError, DeadlineError, TransferFailedError)


@suggesting
def save(  # noqa: PLR0913 (a public signature)
    state_dict: Any,
    store: Store | AsyncStore,
    prefix: str,
    *,
    pin: Pin = "soft",
    checksum: bool = True,
    replicas: int = 1,
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int, int], object] | None = None,
    process_group: Any = None,
    no_dist: bool = False,
) -> Checkpoint:
    """Save a state dict under a name.

    The checkpoint becomes visible as a whole, when all of its parts are stored; until then loads
    return the one that had the name before. Its objects are one group: the pool evicts all or none.
    If torch has a default process group, all its ranks call this together.

    Args:
        state_dict: Dicts, lists and tuples of tensors, arrays, text, numbers, bytes and None.
        store: The store.
        prefix: Name of the checkpoint, for instance ``"run/1"``.
        pin: ``"soft"`` protects it from eviction while anything else can be evicted, ``"hard"``
            always; None does not.
        checksum: Store a checksum of each part, which loads compare. With it, a save continues one
            that was interrupted: parts with the same bytes are not put again.
        replicas: Number of copies of each part.
        metadata: Text that is stored beside the tensors.
        progress: Called with the bytes that are done, and all, of this rank.
        process_group: The ranks that save together; None is torch's default group.
        no_dist: Save alone although there is a process group.

    Returns:
        The description of the checkpoint.

    Raises:
        TypeError: A value cannot be stored; the message has its path.
        InvalidArgumentError: The name is not one, or ranks contradict each other.
        NoSpaceError: The pool has not the memory; the message has the bytes needed and free.
        AlreadyExistsError: Another save of this name ended meanwhile.
        NotFoundError: The checkpoint was deleted meanwhile.
        NotSupportedError: A newer release wrote the checkpoint that has the name.
    """
    ranks = Ranks(process_group, no_dist=no_dist)
    terms = Terms(pin, checksum, replicas, dict(metadata or {}))
    return save_local(lambda: LocalTensors(state_dict), store, prefix, terms, progress, ranks)


@dataclass(frozen=True, slots=True)
class Terms:
    """How a checkpoint is saved.

    Attributes:
        pin: What protects it from eviction.
        checksum: Store a checksum of each part.
        replicas: Number of copies of each part.
        metadata: Text that is stored beside the tensors.
    """

    pin: Pin = "soft"
    checksum: bool = True
    replicas: int = 1
    metadata: dict[str, str] = field(default_factory=dict)


def save_local(
    make: Callable[[], LocalTensors | FileTensors],
    store: Store | AsyncStore,
    prefix: str,
    terms: Terms,
    progress: Callable[[int, int], object] | None = None,
    ranks: Ranks | None = None,
) -> Checkpoint:
    """Save the tensors that a function returns at each rank; see `save`."""
    ranks = ranks or Ranks(no_dist=True)
    known: list[tuple[Any, Keys, LocalTensors | FileTensors]] = []

    def document() -> dict[str, Any]:
        native, keys = native_of(store), Keys(prefix)
        put_options(terms.pin, terms.replicas, "", 0)
        known.append((native, keys, make()))
        return known[0][2].document()

    documents = ranks.gather(document)
    ((native, keys, local),) = known
    layout = Layout(documents)
    publication = Publication(native, keys, pin=terms.pin, replicas=terms.replicas)
    texts = {str(name): str(text) for name, text in terms.metadata.items()}

    def begin() -> dict[str, Any]:
        longest = max((place.nbytes for place in layout.places), default=0)
        return publication.begin(layout.nbytes, longest, resumes=terms.checksum)

    try:
        publication.take(ranks.from_first(begin))
        stored: Stored = {}

        def write() -> list[Any]:
            writer = _Writer(publication, layout, local, ranks.rank, has_checksums=terms.checksum)
            written = [*writer.write(progress).items()]
            local.check()
            return written

        for each in ranks.gather(write):
            stored.update({at: tuple(known) for at, known in each})
        manifest = layout.manifest(publication.save, stored, texts)
        ranks.from_first(lambda: publication.publish(manifest))
    except Exception as error:
        if ranks.is_first and publication.save and not isinstance(error, _LOST):
            publication.abandon()
        raise
    finally:
        publication.end()
    return Checkpoint.of(prefix, manifest)


class _Writer:
    """Puts the parts that this rank writes."""

    def __init__(
        self,
        publication: Publication,
        layout: Layout,
        local: LocalTensors | FileTensors,
        rank: int,
        *,
        has_checksums: bool,
    ) -> None:
        self._publication = publication
        self._has_checksums = has_checksums
        self._rank = rank
        # Two batches of files are in memory: one is put while the next is read.
        self._files = [FileMemory() for _ in range(2)] if isinstance(local, FileTensors) else []
        self._names = layout.names(publication.save)
        self._own = [(at, each) for at, each in enumerate(layout.places) if each.rank == rank]
        self._blocks = [
            local.tensors[place.source[0]].blocks[place.source[1]] for _, place in self._own
        ]

    def write(self, progress: Callable[[int, int], object] | None) -> Stored:
        """Put the parts; return name, version and checksum of each."""
        stored: Stored = {}
        sizes = [place.nbytes for _, place in self._own]
        total, done = sum(sizes), 0
        with checksum_threads() as pool, ThreadPoolExecutor(1) as reader:
            for number, sources in enumerate(self._batches(sizes, reader)):
                stored.update(self._reused(sources))
                rows = [at for at in sources if at not in stored]
                names = [self._names[at] for at in rows]
                parts = [sources[at] for at in rows]
                own_pool = pool if self._has_checksums else None
                known = put_parts(self._publication, names, parts, own_pool, total)
                put = dict(zip(rows, known, strict=True))
                stored.update(put)
                done += sum(source.nbytes for source in sources.values())
                if self._has_checksums and put and done < total:
                    self._record(number, put)
                if progress is not None and done < total:
                    progress(done, total)
        if progress is not None:
            progress(total, total)
        return stored

    def _batches(
        self, sizes: Sequence[int], reader: ThreadPoolExecutor
    ) -> Iterator[dict[int, Source]]:
        """Return the memory of the parts by batch. A batch of files is there until the next one."""
        pieces = list(batched(sizes))
        if not self._files:
            for piece in pieces:
                yield self._numbered(piece, map(Source.of, self._blocks[piece]))
            return
        reads: list[Future[list[Source]]] = []
        for number, piece in enumerate(pieces):
            for ahead in range(len(reads), min(number + 2, len(pieces))):
                memory = self._files[ahead % 2]
                reads.append(reader.submit(memory.read, self._blocks[pieces[ahead]]))
            yield self._numbered(piece, reads[number].result())

    def _numbered(self, piece: slice, sources: Iterable[Source]) -> dict[int, Source]:
        return {at: source for (at, _), source in zip(self._own[piece], sources, strict=True)}

    def _reused(self, sources: dict[int, Source]) -> Stored:
        """Return the parts of interrupted saves that have the same bytes."""
        publication, reusable = self._publication, self._publication.reusable
        candidates = {
            at: reusable[suffix]
            for at in sources
            if (suffix := suffix_of(self._names[at])) in reusable
        }
        if not candidates:
            return {}
        keys = [publication.keys.of(name) for name, _, _ in candidates.values()]
        stored: Stored = {}
        for at, known in zip(candidates, publication.native.describe(keys), strict=True):
            source, (_, version, xxh3) = sources[at], candidates[at]
            if not publication.is_usable(known, source.nbytes, version):
                continue
            if xxh3_of(source.address, source.nbytes) == xxh3:
                stored[at] = candidates[at]
        return stored

    def _record(self, number: int, put: Stored) -> None:
        """Store what the next save needs to know if this one is interrupted."""
        publication = self._publication
        name = f"@{publication.save}/{JOURNAL}{self._rank}.{number}"
        options = publication.options(1)
        data = journal(options.groups[0] if options.groups else "", put)
        (outcome,) = publication.native.put(
            [publication.keys.of(name)], [data], options=options, is_upsert=True
        )
        if isinstance(outcome, MooncakeError) and not isinstance(outcome, NoSpaceError):
            raise outcome


def put_parts(
    publication: Publication,
    names: Sequence[str],
    sources: Sequence[Source],
    pool: ThreadPoolExecutor | None,
    needed: int,
) -> list[tuple[str, int, int | None]]:
    """Put parts of a save in one batch; return name, version and checksum of each.

    Args:
        publication: The save.
        names: Names of the parts.
        sources: Their memory.
        pool: Threads that compute the checksums meanwhile; None for no checksums.
        needed: Bytes that the save puts, for the text of an error.

    Raises:
        NoSpaceError: The pool is full.
    """
    if not names:
        return []
    sums = [pool.submit(_checksum, source) for source in sources] if pool is not None else []
    keys = [publication.keys.of(name) for name in names]
    outcomes = publication.native.put_versions(
        keys,
        [source.view() for source in sources],
        options=publication.options(len(keys)),
        is_upsert=True,
    )
    for key, outcome in zip(keys, outcomes, strict=True):
        if isinstance(outcome, NoSpaceError):
            raise pool_full(publication.native, key, needed) from outcome
        if isinstance(outcome, MooncakeError):
            raise outcome
    found = [each.result() for each in sums] if sums else [None] * len(names)
    return list(zip(names, outcomes, found, strict=True))


def _checksum(source: Source) -> int:
    return xxh3_of(source.address, source.nbytes)
