"""Forms in which a tensor is stored under a key, and which of them a put agrees with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mooncake._api.values import decoded
from mooncake._runtime import _native
from mooncake.errors import MooncakeError, NotReadyError
from mooncake.tensor.calls import Operation
from mooncake.tensor.format import (
    GENERATION_TAG,
    AxisRecord,
    FormatError,
    Manifest,
    TensorMetadata,
    manifest_key,
    shard_key,
    writer_manifest_key,
)
from mooncake.tensor.layout import Layout, Shard
from mooncake.tensor.search import Head, mixed, read_heads

__all__ = ["OTHER_AXES", "Form", "forms_of", "is_shard_of", "marks_of", "other_layout"]

_ALREADY_EXISTS = -705
OTHER_AXES = "*"
"""Begin of the marks of a manifest if shards with other axes were put under the key before."""


@dataclass(frozen=True, slots=True)
class Form:
    """What is stored of a tensor, as one call saw it.

    Attributes:
        key: Key of the tensor.
        is_whole: There is an object under the key itself.
        size: Number of shards of one ``tp`` axis; 0 without a first one.
        dim: Dimension that these split.
        manifest: Manifest of shards.
        writers: Manifest of the parts of writers.
        of_first: Which call has written the first shard; "" if that is not known.
        marks: What the manifest says of the axes of its shards; "" if nothing.
        shards: The shards that were asked for, by key, and which call has written each.
    """

    key: bytes
    is_whole: bool
    size: int
    dim: int | None
    manifest: Manifest | None
    writers: Manifest | None
    of_first: str = ""
    marks: str = ""
    shards: dict[bytes, tuple[TensorMetadata, str]] = field(default_factory=dict)

    @property
    def is_split(self) -> bool:
        """Whether there are shards or parts of writers, as far as known without a list of keys."""
        return self.size > 0 or self.manifest is not None or self.writers is not None

    @property
    def layouts(self) -> list[str]:
        """The layouts in words."""
        texts = ["whole"] if self.is_whole else []
        if self.size > 0:
            texts.append(_split_text(self.size, self.dim))
        elif self.manifest is not None:
            texts.append(_split_text(self.manifest.shard_count, self.manifest.split_dim))
        if self.writers is not None:
            size, dim = self.writers.shard_count, self.writers.split_dim
            texts.append(f"{size} parts of writers along dimension {dim}")
        return texts

    def agrees_with(self, layout: Layout | Shard | None) -> bool:
        """Return whether a tensor can be put in a layout beside what is stored."""
        if layout is None:
            return not self.is_split
        if self.is_whole or self.writers is not None:
            return False
        size, dim, has_others = _split_of(layout)
        if has_others:
            return self.size == 0
        if self.size > 0:
            return (self.size, self.dim) == (size, dim)
        known = self.manifest
        return known is None or (known.shard_count, known.split_dim) == (size, dim)

    def may_have_axes(self, layout: Layout | Shard | None) -> bool:
        """Return whether shards with further axes may be stored, in another layout.

        A layout of one axis has a first shard beside its manifest, unless that was lost. Shards of
        several experts or stages have one manifest, which is that of the last one that was put.
        """
        if layout is None or self.size > 0 or self.manifest is None:
            return False
        size, dim, has_others = _split_of(layout)
        if not has_others:
            return isinstance(layout, Layout)
        return dim is not None and (self.manifest.shard_count, self.manifest.split_dim) != (
            size,
            dim,
        )

    def generation(self, names: Sequence[bytes], layout: Layout | Shard) -> str | None:
        """Return which call has written the shards that a put would complete; None without any.

        Args:
            names: Keys of the shards that count.
            layout: The layout of the put.

        Raises:
            AlreadyExistsError: One of the shards is of another layout.
            NotReadyError: They are of different versions.
        """
        found = [(name, *self.shards[name]) for name in names if name in self.shards]
        for _, metadata, _ in found:
            if not _is_of(metadata, layout):
                raise other_layout(self, layout, [_text_of(metadata)])
        written = {generation for _, _, generation in found}
        if len(written) > 1:
            raise mixed(self.key, sorted(written))
        return written.pop() if written else None

    def generation_of_shard(self, name: bytes, layout: Shard) -> str:
        """Return which call has written the shard that a put replaces, or the others of its set."""
        if name in self.shards:
            metadata, generation = self.shards[name]
            return generation if _is_of(metadata, layout) else ""
        is_of_first = _split_of(layout) == (self.size, self.dim, False)
        return self.of_first if is_of_first else ""


def forms_of(
    wanted: Sequence[tuple[bytes, Sequence[bytes]]],
) -> Operation[list[Form | MooncakeError]]:
    """Look up in which forms tensors are stored, with one call; lease none.

    Args:
        wanted: Key of each tensor, and keys of shards whose metadata is wanted.
    """
    keys: list[bytes] = []
    manifests: list[bytes] = []
    for key, shards in wanted:
        keys += [key, _first_key(key), *shards]
        manifests += [manifest_key(key), writer_manifest_key(key)]
    heads = yield from read_heads(keys, manifests, tag=GENERATION_TAG)
    rows, of_manifests = iter(heads[: len(keys)]), iter(heads[len(keys) :])
    forms: list[Form | MooncakeError] = []
    for key, shards in wanted:
        own = [next(rows) for _ in range(2 + len(shards))]
        own += [next(of_manifests) for _ in range(2)]
        failures = [head.data for head in own if isinstance(head.data, MooncakeError)]
        failed = next((each for each in failures if not isinstance(each, NotReadyError)), None)
        forms.append(_form(key, shards, own) if failed is None else failed)
    return forms


def is_shard_of(head: Head, layout: Shard) -> bool:
    """Return whether the head of an object is that of a shard of a layout."""
    metadata = _metadata(head)
    return metadata is not None and _is_of(metadata, layout)


def marks_of(form: Form, layout: Layout | Shard | None) -> str:
    """Return what the manifest of shards with further axes is to say of them.

    It says the kinds and sizes of the axes, and whether other ones were put before: the shards of
    those may still be there, since all experts, stages and replicas have the same manifest.

    Args:
        form: What was stored before.
        layout: Layout of the put.
    """
    if layout is None:
        return ""
    shard = layout.shard(0) if isinstance(layout, Layout) else layout
    split = shard.axis("tp")
    if split is not None and len(shard.axes) == 1:
        return OTHER_AXES if form.marks else ""
    own = " ".join(
        f"{axis.kind}={axis.size}" + (f"/{axis.dim}" if axis is split else "")
        for axis in shard.axes
    )
    known = form.manifest
    if known is None:
        return own
    before = form.marks
    size, dim, _ = _split_of(layout)
    is_same = (known.shard_count, known.split_dim) == (size, dim or 0)
    is_other = before.startswith(OTHER_AXES) or before not in ("", own) or not is_same
    return (OTHER_AXES if is_other else "") + own


def other_layout(form: Form, layout: Layout | Shard | None, stored: Sequence[str]) -> MooncakeError:
    """Return the error for a put of a tensor that is stored in another layout."""
    return _native.failure(
        _ALREADY_EXISTS,
        "the tensor is stored in another layout",
        key=decoded(form.key),
        context={"stored": ", ".join(stored), "given": _layout_text(layout)},
        remedy="Put it with overwrite=True to replace that, or call delete_tensor first.",
    )


def _form(key: bytes, shards: Sequence[bytes], heads: Sequence[Head]) -> Form:
    whole, first, *own = heads
    of_writers, of_set = own.pop(), own.pop()
    metadata = _metadata(first)
    axis = _tp_axis(metadata) if metadata is not None else None
    found = {}
    for name, head in zip(shards, own, strict=True):
        each = _metadata(head)
        if each is not None:
            found[name] = each, head.generation
    return Form(
        key,
        isinstance(whole.data, bytes),
        axis.size if axis is not None else 0,
        axis.split_dim if axis is not None else None,
        _manifest(of_set),
        _manifest(of_writers),
        first.generation,
        of_set.generation,
        found,
    )


def _first_key(key: bytes) -> bytes:
    return shard_key(key, [AxisRecord("tp", 0, 1)])


def _metadata(head: Head) -> TensorMetadata | None:
    if not isinstance(head.data, bytes):
        return None
    try:
        return TensorMetadata.decode(head.data)
    except FormatError:
        return None


def _manifest(head: Head) -> Manifest | None:
    if not isinstance(head.data, bytes):
        return None
    try:
        return Manifest.decode(head.data)
    except FormatError:
        return None


def _tp_axis(metadata: TensorMetadata) -> AxisRecord | None:
    return next((axis for axis in metadata.axes if axis.kind == "tp"), None)


def _split_of(layout: Layout | Shard) -> tuple[int, int | None, bool]:
    """Return size and dimension of the split of a layout, and whether it has other axes."""
    if isinstance(layout, Layout):
        return layout.size, layout.dim, bool(layout.axes)
    axis = layout.axis("tp")
    if axis is None:
        return 1, None, True
    return axis.size, axis.dim, len(layout.axes) > 1


def _is_of(metadata: TensorMetadata, layout: Layout | Shard) -> bool:
    """Return whether a stored shard is one of a layout."""
    axis, (size, dim, _) = _tp_axis(metadata), _split_of(layout)
    if axis is None:
        return dim is None
    return (axis.size, axis.split_dim) == (size, dim)


def _layout_text(layout: Layout | Shard | None) -> str:
    if layout is None:
        return "whole"
    size, dim, has_others = _split_of(layout)
    if not has_others:
        return _split_text(size, dim)
    others = [str(axis) for axis in layout.axes if axis.kind != "tp"]
    return " ".join([_split_text(size, dim)] * (dim is not None) + others)


def _text_of(metadata: TensorMetadata) -> str:
    axis = _tp_axis(metadata)
    return "whole" if axis is None else _split_text(axis.size, axis.split_dim)


def _split_text(size: int, dim: int | None) -> str:
    return f"{size} shard{'s' * (size != 1)} along dimension {dim}"
