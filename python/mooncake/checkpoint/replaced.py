"""The checkpoint that a save replaces, and how it comes back if the save turns out incomplete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mooncake._api.values import changed
from mooncake._runtime import PutOptions
from mooncake.checkpoint.manifest import (
    NOT_SUPPORTED,
    Manifest,
    lost_part,
    read_text,
)
from mooncake.checkpoint.names import Keys, error_of
from mooncake.checkpoint.transfer import put_options
from mooncake.errors import CorruptError, MooncakeError, NotFoundError, NotSupportedError

__all__ = ["Replaced"]


@dataclass(frozen=True, slots=True)
class Replaced:
    """A checkpoint that has the name of a save when that begins.

    Attributes:
        version: Version of its manifest.
        group: Group of its objects.
        options: With these its manifest was put.
        text: Text of its manifest; None if it cannot be read.
        manifest: Its manifest; None if it is damaged.
    """

    version: int
    group: str
    options: PutOptions
    text: bytes | None
    manifest: Manifest | None

    @classmethod
    def read(cls, native: Any, keys: Keys) -> Replaced | None:
        """Read the checkpoint that has a name; None if there is none.

        Raises:
            NotSupportedError: A newer release wrote it.
        """
        (known,) = native.describe([keys.manifest])
        if isinstance(known, NotFoundError):
            return None
        if isinstance(known, MooncakeError):
            raise known
        is_soft = known["soft_pin_ttl_s"] is not None
        pin = "hard" if known["is_hard_pinned"] else "soft" if is_soft else None
        options = put_options(pin, max(known["replicas"], 1), known["group"], 1)
        version, text, manifest = known["version"], None, None
        try:
            text, version = read_text(native, keys)
            manifest = Manifest.decode(text, keys, version)
        except (CorruptError, NotFoundError):
            pass
        except NotSupportedError as error:
            message = "a newer release wrote the checkpoint of this name, and it was kept"
            remedy = "Save with that release or under another name, or delete the checkpoint."
            raise error_of(NOT_SUPPORTED, message, key=keys.manifest, remedy=remedy) from error
        return cls(version, known["group"], options, text, manifest)

    def owners(self, keys: Keys) -> set[str]:
        """Return the ids of the saves that put its parts; none if it is damaged."""
        parts = self.manifest.parts() if self.manifest is not None else ()
        return {keys.save_of(keys.of(part.name)) or "" for part in parts}

    def restore(self, native: Any, keys: Keys, version: int) -> int:
        """Put the manifest again in the place of one that has a version; return its new version.

        Raises:
            NoSpaceError: The pool is full.
        """
        options = changed(self.options, if_versions=[version])
        (outcome,) = native.put_versions(
            [keys.manifest], [self.text], options=options, is_upsert=True
        )
        if isinstance(outcome, MooncakeError):
            raise outcome
        if self.manifest is not None and lost_part(native, keys, self.manifest) is not None:
            # It was deleted meanwhile.
            native.remove([keys.manifest], force=True, if_version=outcome)
        return int(outcome)
