"""One save of a checkpoint: check of the memory, parts, and the manifest that makes it visible."""

from __future__ import annotations

import contextlib
from typing import Any, Literal, TypeAlias

from mooncake._api.blocking.leases import Lease
from mooncake._runtime import PutOptions
from mooncake.checkpoint.inventory import remove_stale
from mooncake.checkpoint.journal import is_journal, read_journals
from mooncake.checkpoint.manifest import Manifest, read_manifest
from mooncake.checkpoint.names import NO_SPACE, Keys, error_of, listed, new_save_id
from mooncake.checkpoint.room import check_room
from mooncake.checkpoint.transfer import group_of, put_options
from mooncake.errors import CorruptError, MooncakeError, NotFoundError, NotSupportedError

__all__ = ["Pin", "Publication"]

Pin: TypeAlias = Literal["soft", "hard"] | None

_EXISTS = -705
_MARKER = "~lease."
_LEASE_EVERY_S = 0.5
_DESCRIBED_MAX = 1024


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
