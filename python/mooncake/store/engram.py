"""Embedding tables stored as objects: one for each head of a layer, read by rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mooncake._hints import np, npt
from mooncake.errors import MooncakeError, NotFoundError
from mooncake.store.base import StoreBase
from mooncake.store.batch import as_bool
from mooncake.store.codes import INVALID_PARAMS
from mooncake.store.pool import inner_store

__all__ = ["EngramStore", "EngramStoreConfig"]

_ITEM_BYTES = 4


class EngramStoreConfig:
    """Shape of the tables of a layer.

    Attributes:
        table_vocab_sizes: Number of rows of the table of each head.
        embedding_dim: Number of elements of a row.
    """

    __slots__ = ("embedding_dim", "table_vocab_sizes")

    def __init__(self) -> None:
        """Set one table of 1024 rows of 64 elements."""
        self.table_vocab_sizes: list[int] = [1024]
        self.embedding_dim: int = 64


class EngramStore:
    """The tables of one layer, stored as objects and looked up by rows."""

    __slots__ = ("_dim", "_keys", "_sizes", "_store")

    def __init__(self, layer_id: int, config: EngramStoreConfig, store: object = None) -> None:
        """Name the tables of a layer, without reading or writing them.

        Args:
            layer_id: Number of the layer, which is part of the keys of its tables.
            config: Shape of the tables.
            store: A `MooncakeDistributedStore` that is set up, or a wrapper of one; required for
                reads and writes.

        Raises:
            ValueError: There is no table, or one has no rows or no elements.
        """
        sizes = [int(size) for size in config.table_vocab_sizes]
        if not sizes:
            raise ValueError("EngramStoreConfig.table_vocab_sizes must not be empty")
        if min(sizes) <= 0:
            raise ValueError("EngramStoreConfig.table_vocab_sizes must be positive")
        if int(config.embedding_dim) <= 0:
            raise ValueError("EngramStoreConfig.embedding_dim must be positive")
        self._store: StoreBase | None = None if store is None else inner_store(store)
        self._sizes = sizes
        self._dim = int(config.embedding_dim)
        self._keys = [f"engram:l{int(layer_id)}:h{head}" for head in range(len(sizes))]

    def populate(self, embedding_buffers: list[Any]) -> None:
        """Store the tables, all of them or none.

        Args:
            embedding_buffers: For each head a contiguous float32 array of its rows.

        Raises:
            RuntimeError: There is not one array for each head, an array has another size or type, a
                table exists already, or the store fails.
        """
        import numpy as np

        if len(embedding_buffers) != len(self._sizes):
            raise RuntimeError("embedding_buffers size must match num_heads")
        tables: list[Any] = []
        for head, (table, rows) in enumerate(zip(embedding_buffers, self._sizes, strict=True)):
            array = np.ascontiguousarray(table)
            if array.dtype != np.float32 or array.size != rows * self._dim:
                raise RuntimeError(
                    f"populate failed: head={head} needs {rows}x{self._dim} float32, got "
                    f"{array.shape} {array.dtype}"
                )
            tables.append(array)
        native = None if self._store is None else self._store._native
        if native is None:
            raise RuntimeError("populate failed: there is no store, or it is not set up")
        stored = native.put(self._keys, tables)
        if all(outcome is True for outcome in stored):
            return
        mine = [key for key, outcome in zip(self._keys, stored, strict=True) if outcome is True]
        native.remove(mine, force=True)
        for key, outcome in zip(self._keys, stored, strict=True):
            if isinstance(outcome, MooncakeError):
                raise RuntimeError(f"populate failed: {outcome}") from outcome
            if outcome is False:
                raise RuntimeError(f"populate failed: {key!r} is there already")

    def lookup(self, row_ids: object) -> npt.NDArray[np.float32]:
        """Read only the requested rows of the tables.

        Args:
            row_ids: Integers of shape ``[B, L, H]``: for each head a row of its table.

        Returns:
            The rows, of shape ``[B, L, H, D]``.

        Raises:
            RuntimeError: The shape is wrong, a row is outside of its table, or a table cannot be
                read.
        """
        import numpy as np

        ids = np.asarray(row_ids)
        if ids.ndim != 3:
            raise RuntimeError("row_ids array must have shape [B, L, H]")
        if ids.shape[2] != len(self._sizes):
            raise RuntimeError("row_ids last dimension must match num_heads")
        if ids.size and ids.dtype.kind not in "iu":
            raise RuntimeError(f"EngramStore lookup failed: row_ids are {ids.dtype}, not integers")
        out = np.empty((*ids.shape, self._dim), np.float32)
        rows = [ids[:, :, head].reshape(-1) for head in range(len(self._sizes))]
        for head, (wanted, size) in enumerate(zip(rows, self._sizes, strict=True)):
            if wanted.size and not 0 <= int(wanted.min()) <= int(wanted.max()) < size:
                raise RuntimeError(f"EngramStore lookup failed: a row is not in table head={head}")
        native = None if self._store is None else self._store._native
        if native is None:
            raise RuntimeError("EngramStore lookup failed: there is no store, or it is not set up")
        row_bytes = self._dim * _ITEM_BYTES
        columns = [_parts(wanted, head, len(rows), row_bytes) for head, wanted in enumerate(rows)]
        outcomes = native.get_parts(
            self._keys,
            [out.ctypes.data] * len(rows),
            [destinations for destinations, _, _ in columns],
            [offsets for _, offsets, _ in columns],
            [lengths for _, _, lengths in columns],
        )
        for key, outcome in zip(self._keys, outcomes, strict=True):
            parts = [outcome] if isinstance(outcome, MooncakeError) else outcome
            for part in parts:
                if isinstance(part, MooncakeError):
                    raise RuntimeError(f"EngramStore lookup failed: {key!r}: {part}") from part
        return out

    def get_store_keys(self) -> list[str]:
        """Return the keys of the tables, by head."""
        return list(self._keys)

    def get_num_heads(self) -> int:
        """Return the number of tables."""
        return len(self._sizes)

    def get_embedding_dim(self) -> int:
        """Return the number of elements of a row."""
        return self._dim

    def get_table_vocab_sizes(self) -> list[int]:
        """Return the number of rows of each table."""
        return list(self._sizes)

    def remove_from_store(self, force: bool = False) -> int:
        """Remove the tables.

        Args:
            force: Remove also tables that were read recently.

        Returns:
            Number of removed tables.

        Raises:
            RuntimeError: A table cannot be removed, or there is no store.
        """
        native = None if self._store is None else self._store._native
        if native is None:
            raise RuntimeError(f"remove_from_store failed, rc={INVALID_PARAMS}")
        outcomes = native.remove(self._keys, force=as_bool("force", force))
        for outcome in outcomes:
            if isinstance(outcome, MooncakeError) and not isinstance(outcome, NotFoundError):
                raise RuntimeError(f"remove_from_store failed, rc={outcome.code}") from outcome
        return sum(not isinstance(outcome, MooncakeError) for outcome in outcomes)


def _parts(
    wanted: npt.NDArray[Any], head: int, heads: int, row_bytes: int
) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Return destinations, sources and lengths of the rows of one head."""
    destinations = [(place * heads + head) * row_bytes for place in range(len(wanted))]
    return destinations, [int(row) * row_bytes for row in wanted], [row_bytes] * len(wanted)
