"""`save`: parts first, the manifest last, then the parts of earlier saves are removed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from mooncake._api.async_store import AsyncStore
from mooncake._api.blocking.leases import Lease
from mooncake._api.keywords import suggesting
from mooncake._api.store import Store
from mooncake._runtime import PutOptions
from mooncake.checkpoint.inventory import Checkpoint, remove_stale
from mooncake.checkpoint.journal import JOURNAL, is_journal, journal, read_journals, suffix_of
from mooncake.checkpoint.layout import Layout
from mooncake.checkpoint.local import LocalTensors
from mooncake.checkpoint.manifest import Manifest, read_manifest
from mooncake.checkpoint.names import (
    NO_SPACE,
    Keys,
    error_of,
    listed,
    native_of,
    new_save_id,
)
from mooncake.checkpoint.ranks import Ranks
from mooncake.checkpoint.room import check_room
from mooncake.checkpoint.safetensors import FileMemory, FileTensors
from mooncake.checkpoint.transfer import (
    Source,
    batched,
    checksum_threads,
    group_of,
    put_options,
    xxh3_of,
)
from mooncake.errors import (
    CorruptError,
    DeadlineError,
    MooncakeError,
    NoSpaceError,
    NotFoundError,
    NotSupportedError,
    TransferFailedError,
    UnavailableError,
)

__all__ = ["Pin", "Publication", "Terms", "put_parts", "save", "save_local"]

Pin: TypeAlias = Literal["soft", "hard"] | None
Stored: TypeAlias = dict[int, tuple[str, int, int | None]]
"""Name, version and checksum of parts by their number."""

_EXISTS = -705
_MARKER = "~lease."
_LEASE_EVERY_S = 0.5
_DESCRIBED_MAX = 1024
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
    native = native_of(store)
    known: list[tuple[Keys, LocalTensors | FileTensors]] = []

    def document() -> dict[str, Any]:
        keys = Keys(prefix)
        put_options(terms.pin, terms.replicas, "", 0)
        known.append((keys, make()))
        return known[0][1].document()

    documents = ranks.gather(document)
    ((keys, local),) = known
    layout = Layout(documents)
    publication = Publication(native, keys, pin=terms.pin, replicas=terms.replicas)
    texts = {str(name): str(text) for name, text in terms.metadata.items()}

    def begin() -> dict[str, Any]:
        longest = max((place.nbytes for place in layout.places), default=0)
        return publication.begin(layout.nbytes, longest, resumes=terms.checksum)

    try:
        publication.take(ranks.from_first(begin))
        writer = _Writer(publication, layout, local, ranks.rank, has_checksums=terms.checksum)
        stored: Stored = {}

        def write() -> list[Any]:
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


class Publication:
    """One save: from the check of the memory to the manifest, which makes it visible.

    Attributes:
        native: The native store.
        keys: Keys of the checkpoint.
        save: Id of the save; "" before it has begun.
        reusable: Parts of interrupted saves by what follows the id in their names: full name,
            version and checksum.
    """

    def __init__(self, native: Any, keys: Keys, *, pin: Pin, replicas: int) -> None:
        """Prepare a save.

        Args:
            native: The native store.
            keys: Keys of the checkpoint.
            pin: What protects the objects from eviction.
            replicas: Number of copies.
        """
        self.native, self.keys, self.save = native, keys, ""
        self.reusable: dict[str, tuple[str, int, int]] = {}
        self._pin, self._replicas, self._group = pin, replicas, ""
        self._old: Manifest | None = None
        self._old_version: int | None = None
        self._old_group = ""
        self._leases = contextlib.ExitStack()

    def options(self, count: int) -> PutOptions:
        """Return the options of a put of some objects."""
        return put_options(self._pin, self._replicas, self._group, count)

    def begin(self, nbytes: int, longest: int, *, resumes: bool) -> dict[str, Any]:
        """Begin at the first rank; return what `take` needs at every rank.

        Args:
            nbytes: Length of all parts.
            longest: Length of the longest part.
            resumes: Use parts of saves that were interrupted.

        Raises:
            NoSpaceError: The pool has not the memory.
        """
        self._find_old()
        dead: dict[str, int] = {}
        journals: list[str] = []
        current = {self.keys.of(part.name) for part in self._old.parts()} if self._old else set()
        for key, size, is_complete in listed(self.native, self.keys.saves):
            owner = self.keys.save_of(key)
            if owner is None or key in current:
                continue
            dead[owner] = dead.get(owner, 0) + size
            if is_complete and is_journal(key):
                journals.append(key)
        self.save = new_save_id()
        group, found = read_journals(self.native, journals) if resumes else ("", {})
        self._group = group or group_of(self.keys.prefix, self.save)
        owners = {self.keys.save_of(self.keys.of(name)) for name, _, _ in found.values()}
        reusable = sum(size for owner, size in dead.items() if owner in owners)
        missing = check_room(
            self.native, self.keys, nbytes, longest, self._replicas, self._old, reusable
        )
        if missing > 0:
            for owner in dead.keys() - owners:
                remove_stale(self.native, self.keys, (), save=owner)
        if nbytes and self._old is not None:
            self._keep_together(self._old_group, "old")
        if nbytes:
            self._keep_together(self._group, "new")
        return {"save": self.save, "group": self._group, "reusable": found}

    def take(self, begun: dict[str, Any]) -> None:
        """Take what the first rank has found."""
        self.save, self._group = begun["save"], begun["group"]
        self.reusable = {name: tuple(known) for name, known in begun["reusable"].items()}

    def is_usable(self, known: Any, nbytes: int, version: int) -> bool:
        """Return whether an object is a part that this save could have put.

        Args:
            known: What the master knows of it.
            nbytes: Length of the part.
            version: Version that the interrupted save has noted.
        """
        if not isinstance(known, dict) or (known["size"], known["version"]) != (nbytes, version):
            return False
        is_soft = known["soft_pin_ttl_s"] is not None
        is_pinned = known["is_hard_pinned"], is_soft
        wanted = self._pin == "hard", self._pin == "soft"
        return is_pinned == wanted and known["group"] == self._group

    def publish(self, manifest: Manifest) -> None:
        """Make a save visible, and remove the parts of earlier ones.

        Raises:
            NoSpaceError: A part was evicted meanwhile.
            AlreadyExistsError: Another save of this name ended meanwhile.
        """
        self._check_parts(manifest)
        options = self.options(1)
        text, key = manifest.encode(), self.keys.manifest
        if self._old_version is not None:
            from mooncake._api.values import changed

            options = changed(options, if_versions=[self._old_version])
        (outcome,) = self.native.put(
            [key], [text], options=options, is_upsert=self._old_version is not None
        )
        if isinstance(outcome, MooncakeError):
            raise outcome
        if not outcome:
            text_of_error = "another save of this checkpoint ended meanwhile, and was kept"
            raise error_of(_EXISTS, text_of_error, key=key, prefix=self.keys.prefix)
        with contextlib.suppress(MooncakeError):
            # The checkpoint is stored; what cannot be removed now is found by the next save.
            remove_stale(self.native, self.keys, [part.name for part in manifest.parts()])

    def abandon(self) -> None:
        """Remove the parts of this save, which has failed."""
        with contextlib.suppress(MooncakeError):
            kept: list[str] = []
            with contextlib.suppress(CorruptError, NotFoundError, NotSupportedError):
                # Another save may have used parts of this one, and published them.
                kept = [part.name for part in read_manifest(self.native, self.keys).parts()]
            remove_stale(self.native, self.keys, kept, save=self.save)

    def end(self) -> None:
        """End the leases."""
        with contextlib.suppress(MooncakeError):
            self._leases.close()

    def _find_old(self) -> None:
        (known,) = self.native.describe([self.keys.manifest])
        if isinstance(known, NotFoundError):
            return
        if isinstance(known, MooncakeError):
            raise known
        self._old_version, self._old_group = known["version"], known["group"]
        with contextlib.suppress(CorruptError, NotFoundError, NotSupportedError):
            self._old = read_manifest(self.native, self.keys)
            self._old_version = self._old.version

    def _keep_together(self, group: str, name: str) -> None:
        """Keep a group from eviction until this save has ended.

        A leased member keeps its group. It is an object of its own, so that parts can be removed
        right after the save, when the lease is not over yet.
        """
        key = self.keys.of(f"@{self.save}/{_MARKER}{name}")
        options = put_options("soft", 1, group, 1)
        (outcome,) = self.native.put([key], [b"lease"], options=options, is_upsert=True)
        if isinstance(outcome, MooncakeError):
            # A full pool: the puts of parts say so, with the bytes that are needed.
            return
        lease = Lease(self.native, [key], _LEASE_EVERY_S, lambda _: None)
        with contextlib.suppress(MooncakeError):
            self._leases.enter_context(lease)

    def _check_parts(self, manifest: Manifest) -> None:
        parts = [*manifest.owners()]
        for at in range(0, len(parts), _DESCRIBED_MAX):
            batch = parts[at : at + _DESCRIBED_MAX]
            keys = [self.keys.of(part.name) for _, part in batch]
            for (name, part), key, known in zip(
                batch, keys, self.native.describe(keys), strict=True
            ):
                if isinstance(known, MooncakeError) and not isinstance(known, NotFoundError):
                    raise known
                if isinstance(known, MooncakeError) or known["version"] != part.version:
                    text = "a part was evicted or removed before all were stored; add memory"
                    raise error_of(NO_SPACE, text, key=key, tensor=name)


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
            raise _full(publication.native, key, needed) from outcome
        if isinstance(outcome, MooncakeError):
            raise outcome
    found = [each.result() for each in sums] if sums else [None] * len(names)
    return list(zip(names, outcomes, found, strict=True))


def _checksum(source: Source) -> int:
    return xxh3_of(source.address, source.nbytes)


def _full(native: Any, key: str, needed: int) -> MooncakeError:
    segments = [each for each in native.segments() if each["takes_objects"]]
    free = sum(each["capacity_bytes"] - each["used_bytes"] for each in segments)
    text = "the pool is full: nothing was saved, and an earlier checkpoint is unchanged"
    return error_of(NO_SPACE, text, key=key, needed_bytes=needed, free_bytes=free)
