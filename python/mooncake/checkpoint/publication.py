"""One save of a checkpoint: check of the memory, parts, and the manifest that makes it visible."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from mooncake._api.values import changed
from mooncake._runtime import PutOptions
from mooncake.checkpoint.journal import is_journal, read_journals
from mooncake.checkpoint.manifest import Manifest, lost_part, read_manifest
from mooncake.checkpoint.marks import Marks
from mooncake.checkpoint.names import NO_SPACE, NOT_FOUND, Keys, error_of, listed, new_save_id
from mooncake.checkpoint.removal import remove_unused
from mooncake.checkpoint.replaced import Replaced
from mooncake.checkpoint.room import check_room, pool_full
from mooncake.checkpoint.transfer import group_of, put_options
from mooncake.errors import (
    CorruptError,
    MooncakeError,
    NoSpaceError,
    NotFoundError,
    NotSupportedError,
)

__all__ = ["Pin", "Publication"]

Pin: TypeAlias = Literal["soft", "hard"] | None

_EXISTS = -705


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
        self._old: Replaced | None = None
        self._ended: set[str] = set()
        self._marks = Marks(native, keys, replicas)

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
            NotSupportedError: A newer release wrote the checkpoint that has the name.
        """
        self._old = Replaced.read(self.native, self.keys)
        old = self._old.manifest if self._old else None
        others: dict[str, int] = {}
        journals: list[str] = []
        current = {self.keys.of(part.name) for part in old.parts()} if old else set()
        for key, size, is_complete in listed(self.native, self.keys.saves):
            owner = self.keys.save_of(key)
            if owner is None or key in current:
                continue
            others[owner] = others.get(owner, 0) + size
            if is_complete and is_journal(key):
                journals.append(key)
        self.save = new_save_id()
        group, found = read_journals(self.native, journals) if resumes else ("", {})
        self._group = group or group_of(self.keys.prefix, self.save)
        owners = {self.keys.save_of(self.keys.of(name)) or "" for name, _, _ in found.values()}
        reusable = sum(size for owner, size in others.items() if owner in owners)
        missing = check_room(self.native, self.keys, nbytes, longest, self._replicas, old, reusable)
        # The parts of a checkpoint with a damaged manifest cannot be told from others.
        if missing > 0 and (self._old is None or old is not None):
            remove_unused(self.native, self.keys, saves=others.keys() - owners)
        # They can no longer end well once this save has.
        self._ended = {*others, self.save}
        if owners and not self._mark_reused(owners, journals):
            found = {}
        self._mark(nbytes)
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

        The parts are looked for before the manifest is put, so that an incomplete save does not
        become visible, and once more after that, while those of the earlier save still are there.

        Raises:
            NoSpaceError: A part was evicted meanwhile.
            AlreadyExistsError: Another save of this name ended meanwhile.
            NotFoundError: The checkpoint was deleted meanwhile.
        """
        # It takes a while: no part may get lost between the look and the put.
        text = manifest.encode()
        lost = self._loss(manifest)
        if lost is not None:
            raise self._overtaken() or lost
        version = self._put(text)
        lost = self._loss(manifest)
        if lost is not None and self._take_back(version):
            raise lost
        self._marks.end()
        with contextlib.suppress(MooncakeError):
            # The checkpoint is stored; what cannot be removed now is found by the next save.
            ended = self._ended | (self._old.owners(self.keys) if self._old else set())
            remove_unused(self.native, self.keys, ended=ended)

    def abandon(self) -> None:
        """Remove the parts of this save, which has failed, unless another save uses them."""
        self._marks.end()
        self._discard(self._old.version if self._old else None)

    def end(self) -> None:
        """Let other saves remove what this one has put, if no manifest names it. Idempotent."""
        self._marks.end()

    def _mark_reused(self, owners: set[str], journals: list[str]) -> bool:
        """Keep the parts of interrupted saves; return whether they can be used.

        `remove_unused` removes the notes and then looks for marks: either it finds these marks, or
        its removal is found here.
        """
        try:
            for owner in owners:
                self._marks.put(owner, self.save, self._group)
        except NoSpaceError:
            self._marks.end()
            return False
        if all(each is True for each in self.native.exists(journals, lease=False)):
            return True
        self._marks.end()
        return False

    def _mark(self, nbytes: int) -> None:
        """Keep the parts of this save and of the one before until this save has ended."""
        if self._old is not None:
            holders = [(owner, self.save) for owner in self._old.owners(self.keys)]
            for owner, holder in holders or [(self.save, f"{self.save}.old")]:
                with contextlib.suppress(MooncakeError):
                    self._marks.put(owner, holder, self._old.group, is_needed=False)
        try:
            self._marks.put(self.save, self.save, self._group)
        except NoSpaceError as error:
            raise pool_full(self.native, self.keys.manifest, nbytes) from error

    def _loss(self, manifest: Manifest) -> MooncakeError | None:
        """Return the error of a save of which a part is gone, or may be soon; None otherwise."""
        if not self._marks.are_there():
            text = (
                "the parts of this save were removed while it ran: by a delete with force, or, as "
                "its lease was over, by another save or by eviction"
            )
            return error_of(NOT_FOUND, text, key=self.keys.manifest, remedy="Save again.")
        lost = lost_part(self.native, self.keys, manifest)
        if lost is None:
            return None
        text = "a part was evicted or removed before all were stored; add memory"
        return error_of(NO_SPACE, text, key=lost[1], tensor=lost[0])

    def _overtaken(self) -> MooncakeError | None:
        """Return the error of a save whose checkpoint was replaced or deleted meanwhile."""
        (known,) = self.native.describe([self.keys.manifest])
        version = known["version"] if isinstance(known, dict) else None
        if version == (self._old.version if self._old else None):
            return None
        if version is None:
            text = "the checkpoint was deleted while it was saved again: nothing was saved"
            return error_of(NOT_FOUND, text, key=self.keys.manifest, remedy="Save again.")
        return self._other_save()

    def _other_save(self) -> MooncakeError:
        text = "another save of this checkpoint ended meanwhile, and was kept"
        return error_of(_EXISTS, text, key=self.keys.manifest, prefix=self.keys.prefix)

    def _put(self, text: bytes) -> int:
        """Put the manifest in the place of that before; return its version."""
        options = self.options(1)
        if self._old is not None:
            options = changed(options, if_versions=[self._old.version])
        (outcome,) = self.native.put_versions(
            [self.keys.manifest], [text], options=options, is_upsert=self._old is not None
        )
        if isinstance(outcome, MooncakeError):
            raise outcome
        if not outcome:
            with contextlib.suppress(CorruptError, NotFoundError, NotSupportedError):
                found = read_manifest(self.native, self.keys)
                if found.save == self.save:
                    # The answer to the put was lost, and the put was repeated.
                    return found.version
            raise self._overtaken() or self._other_save()
        return int(outcome)

    def _take_back(self, version: int) -> bool:
        """Put the manifest of the earlier save in the place of the one that this save has put.

        Returns:
            False if another save or a delete came first: the checkpoint was visible, and no longer
            is.
        """
        (known,) = self.native.describe([self.keys.manifest])
        if not isinstance(known, dict) or known["version"] != version:
            return False
        if self._old is None or self._old.text is None:
            (removed,) = self.native.remove([self.keys.manifest], force=True, if_version=version)
            return removed is True
        try:
            restored = self._old.restore(self.native, self.keys, version)
        except NoSpaceError:
            # Nobody can load what this save has put.
            self._discard(version)
            restored = self._old.restore(self.native, self.keys, version)
        self._old = replace(self._old, version=restored)
        return restored != 0

    def _discard(self, unrelated: int | None) -> None:
        """Remove the parts of this save, if another manifest than an unrelated one lacks them."""
        with contextlib.suppress(MooncakeError):
            saves = {self.save}
            remove_unused(self.native, self.keys, saves=saves, ended=saves, unrelated=unrelated)
