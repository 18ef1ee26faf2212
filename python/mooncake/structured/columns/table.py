"""The codecs of columns that do not consist of columns, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from mooncake.structured.columns.blobs import BYTES, JSON, MSGPACK, TEXT
from mooncake.structured.columns.leaf import EncodedLeaf, LeafCodec, UnsupportedColumnError
from mooncake.structured.columns.media import MEDIA_LISTS
from mooncake.structured.columns.ragged import ARRAYS, TENSORS
from mooncake.structured.columns.scalars import SCALARS
from mooncake.structured.payloads import MASKED_REFUSED, is_masked

__all__ = ["CODECS", "codec_of", "encode_leaf"]

CODECS: Final[Mapping[str, LeafCodec]] = {
    "bytes_ragged": BYTES,
    "json_ragged": JSON,
    "media_bytes": BYTES,
    "media_list_ragged": MEDIA_LISTS,
    "msgpack_ragged": MSGPACK,
    "ndarray": SCALARS,
    "ragged_tensor": TENSORS,
    "typed_ragged": ARRAYS,
    "utf8_ragged": TEXT,
}


def codec_of(name: Any) -> LeafCodec:
    """Return the codec of a name.

    Raises:
        ValueError: There is none.
    """
    codec = CODECS.get(name) if isinstance(name, str) else None
    if codec is None:
        raise ValueError(f"unsupported codec: {name!r}")
    return codec


def encode_leaf(
    name: str, values: Sequence[Any], options: Mapping[str, Any] | None = None
) -> EncodedLeaf:
    """Encode a column with a codec.

    Raises:
        UnsupportedColumnError: The codec cannot represent a row.
        ValueError: There is no such codec.
    """
    codec = codec_of(name)
    if any(map(is_masked, values)):
        raise UnsupportedColumnError(f"a row is a {MASKED_REFUSED}")
    metadata, payloads = codec.encode(values, options or {})
    return EncodedLeaf(name, len(values), metadata, payloads)
