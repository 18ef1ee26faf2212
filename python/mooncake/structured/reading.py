"""Reads of members: all that one call needs are planned first, and made together."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake.structured.bundle import Bundles, payload_reads
from mooncake.structured.destinations import (
    RawDestination,
    TensorObjectBuffer,
    checked_destination,
    raw_bytes,
)
from mooncake.structured.leases import ResultMemory, is_leased, is_leased_address
from mooncake.structured.manifest import PayloadSpec
from mooncake.structured.members import (
    METADATA_BYTES,
    ArrayField,
    TensorField,
    is_pickled,
    load_pickled,
    tensor_metadata_bytes,
    view_as,
)
from mooncake.structured.nested import decode_nested, select_nested
from mooncake.structured.payloads import Array
from mooncake.structured.rows import (
    StructuredMemberSlice,
    covering_span,
    row_spans,
    sliced_rows,
)
from mooncake.tensor import dtypes, format as tensor_format, memory

if TYPE_CHECKING:
    from mooncake.structured.bundle_store import ObjectRead

__all__ = ["MemberReads", "Pending"]

Pending = Callable[[], Any]
"""Returns the value of a member, after `MemberReads.run`."""


class MemberReads:
    """Reads of members of any number of bundles."""

    def __init__(self, bundles: Bundles, results: ResultMemory) -> None:
        """Plan reads.

        Args:
            bundles: The bundles.
            results: Allocates the memory of the values.
        """
        self._bundles = bundles
        self._results = results
        self._reads: list[ObjectRead] = []

    def run(self) -> None:
        """Read everything that was planned.

        Raises:
            RuntimeError: An object does not exist or has another length.
        """
        reads, self._reads = self._reads, []
        if reads:
            self._bundles.objects.read(reads)

    def member(
        self,
        name: str,
        spec: PayloadSpec,
        field: Mapping[str, Any],
        rows: Array | StructuredMemberSlice | None = None,
        destination: Any = None,
    ) -> Pending:
        """Plan the read of a member.

        Args:
            name: Name of the member, for errors.
            spec: Its payload.
            field: Its description.
            rows: Numbers of the rows, or a slice; None for all rows.
            destination: Memory that receives the value; None allocates it.

        Raises:
            TypeError: The destination is of a wrong type.
            ValueError: The description is not valid, or the member has no rows.
        """
        encoding = field.get("encoding", "bytes")
        if encoding == "bytes":
            if rows is not None:
                raise ValueError(f"structured bytes member {name} does not support slicing")
            if destination is not None:
                raise ValueError(
                    f"structured bytes member {name} does not support materialize_into"
                )
            data = self.data(spec)
            return lambda: data.tobytes()
        if encoding == "ndarray":
            return self._array(name, spec, field, rows, destination)
        if encoding != "torch_tensor":
            raise ValueError(f"unsupported structured field encoding {encoding!r}: member {name}")
        if field.get("nested"):
            return self._nested(name, spec, field, rows, destination)
        return self._tensor(name, spec, field, rows, destination)

    def data(self, spec: PayloadSpec) -> Array:
        """Plan the read of a whole payload; return the memory that will hold it."""
        data = self._allocate(spec, spec.nbytes)
        self._read(spec, 0, data)
        return data

    def items(
        self,
        name: str,
        spec: PayloadSpec,
        field: Mapping[str, Any],
        starts: Array,
        ends: Array,
    ) -> Pending:
        """Plan the read of ranges of items of a one-dimensional member, one after the other.

        Args:
            name: Name of the member, for errors.
            spec: Its payload.
            field: Its description; bytes are items of one byte.
            starts: First item of each range.
            ends: End of each range.

        Raises:
            ValueError: A range is outside of the member.
        """
        kind = self._item_field(name, spec, field)
        itemsize, count = kind.dtype.itemsize, kind.shape[0]
        if len(ends) and (int(ends.max()) > count or bool((ends < starts).any())):
            raise ValueError(f"the rows of {name} end behind its {count} items")
        lengths = ends - starts
        is_used = lengths > 0
        starts, ends = starts[is_used], ends[is_used]
        total = int(lengths.sum())
        if total == 0:
            empty = np.empty(0, dtype=kind.dtype)
            return lambda: empty
        # Ranges that follow each other are one range.
        breaks = np.flatnonzero(starts[1:] != ends[:-1]) + 1
        firsts, lasts = starts[[0, *breaks]], ends[[*(breaks - 1), -1]]
        if row_spans(firsts, max(total * itemsize // len(firsts), 1)) is None:
            base = int(starts.min())
            whole = self._allocate(spec, (int(ends.max()) - base) * itemsize, is_member=False)
            self._read(spec, base * itemsize, whole)
            counts = ends - starts
            index = np.repeat(starts - base - (np.cumsum(counts) - counts), counts)
            index += np.arange(total)
            return lambda: whole.view(kind.dtype)[index]
        data = self._allocate(spec, total * itemsize)
        at, leased = 0, is_leased(data)
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            size = (last - first) * itemsize
            part = data[at : at + size]
            self._read(spec, first * itemsize, part, is_registered=leased, is_array=True)
            at += size
        return lambda: data.view(kind.dtype)

    def _item_field(self, name: str, spec: PayloadSpec, field: Mapping[str, Any]) -> ArrayField:
        if field.get("encoding", "bytes") == "bytes":
            return ArrayField(np.dtype(np.uint8), (spec.nbytes,))
        kind = ArrayField.decode(name, field, spec.nbytes)
        if len(kind.shape) != 1:
            raise ValueError(f"structured field {name} has {len(kind.shape)} dimensions")
        return kind

    def _array(
        self,
        name: str,
        spec: PayloadSpec,
        field: Mapping[str, Any],
        rows: Array | StructuredMemberSlice | None,
        destination: Any,
    ) -> Pending:
        kind = ArrayField.decode(name, field, spec.nbytes)
        rows = _row_numbers(rows, kind.shape, "structured ndarray")
        shape = kind.shape if rows is None else (len(rows), *kind.shape[1:])
        result = ArrayField(kind.dtype, shape)
        nbytes = math.prod(shape) * kind.dtype.itemsize
        if destination is None:
            data = self._rows(spec, 0, rows, kind.shape, kind.dtype.itemsize)
            return lambda: view_as(data(), result)
        is_registered = False
        value = destination
        if isinstance(destination, RawDestination):
            _check_size(name, destination, nbytes)
            into = raw_bytes(destination, nbytes)
            is_registered = destination.pre_registered
            value = view_as(into, result)
        else:
            array = checked_destination(name, destination, kind.dtype, shape)
            into = array.reshape(-1).view(np.uint8) if nbytes else np.empty(0, dtype=np.uint8)
        data = self._rows(
            spec, 0, rows, kind.shape, kind.dtype.itemsize, into, is_registered=is_registered
        )

        def finish() -> Any:
            data()
            return value

        return finish

    def _tensor(
        self,
        name: str,
        spec: PayloadSpec,
        field: Mapping[str, Any],
        rows: Array | StructuredMemberSlice | None,
        destination: Any,
    ) -> Pending:
        if is_pickled(spec):
            return self._pickled_tensor(name, spec, rows, destination)
        head_bytes = tensor_metadata_bytes(spec)
        if rows is None and isinstance(destination, TensorObjectBuffer):
            return self._whole_tensor_into(name, spec, destination)
        is_raw = destination is not None and isinstance(
            destination, RawDestination | TensorObjectBuffer
        )
        if self._is_foreign(spec) and not is_raw and (rows is None or not self._has_bytes(spec)):
            return self._foreign_tensor(name, spec, rows, destination)
        if "shape" not in field:
            # Memory that was put as a tensor object is described by its own metadata only.
            field = {**field, **self._described(spec)}
        kind = TensorField.decode(name, field, spec.nbytes)
        itemsize = kind.dtype.itemsize
        rows = _row_numbers(rows, kind.shape, "structured tensor")
        shape = kind.shape if rows is None else (len(rows), *kind.shape[1:])
        if destination is not None:
            return self._tensor_into(name, spec, kind, rows, shape, destination)
        if rows is None:
            whole = self._allocate(spec, spec.nbytes, is_member=False)
            self._read(spec, 0, whole)

            def restored() -> Any:
                metadata = tensor_format.TensorMetadata.decode(whole.data, total=spec.nbytes)
                if (metadata.dtype, metadata.local_shape) != (kind.dtype, shape):
                    raise ValueError(
                        f"structured tensor field {name}: the stored tensor is of "
                        f"dtype={metadata.dtype.name} and shape={metadata.local_shape}"
                    )
                return memory.restore(whole.data, metadata)

            return restored
        data = self._rows(spec, head_bytes, rows, kind.shape, itemsize)
        return lambda: memory.as_torch(data().data, kind.dtype, shape)

    def _is_foreign(self, spec: PayloadSpec) -> bool:
        """Return whether only the store itself knows the bytes of a tensor."""
        return spec.extra.get("kind") == "tensor" and not self._bundles.objects.is_native

    def _has_bytes(self, spec: PayloadSpec) -> bool:
        """Return whether the bytes of a tensor in another store are those of a stored tensor."""
        try:
            described = self._described(spec)
        except (RuntimeError, ValueError):
            return False
        dtype = str(spec.extra.get("dtype")).removeprefix("torch.")
        return (described["dtype"], described["shape"]) == (dtype, spec.extra.get("shape"))

    def _foreign_tensor(
        self,
        name: str,
        spec: PayloadSpec,
        rows: Array | StructuredMemberSlice | None,
        destination: Any,
    ) -> Pending:
        """Read a tensor with the store's own call."""
        get = self._bundles.objects.call("get_tensor")
        if get is None:
            raise RuntimeError(
                f"the store does not support get_tensor, which reads the member {name}"
            )
        value = get(spec.key)
        if value is None:
            raise RuntimeError(f"get_tensor failed for {spec.key}")
        chosen = _row_numbers(rows, tuple(value.shape), "structured tensor")
        value = value if chosen is None else value[chosen]
        if destination is not None:
            kind = TensorField(dtypes.DType.of_torch(value.dtype), tuple(value.shape))
            _tensor_bytes(name, destination, kind, kind.shape)
            destination.copy_(value)
            value = destination
        return lambda: value

    def _whole_tensor_into(
        self, name: str, spec: PayloadSpec, destination: TensorObjectBuffer
    ) -> Pending:
        """Plan the read of a whole stored tensor, with its metadata, into memory."""
        _check_size(name, destination, spec.nbytes)
        if self._is_foreign(spec):
            get = self._bundles.objects.call("get_tensor_into")
            if get is None:
                raise RuntimeError(
                    f"the store does not support get_tensor_into, which reads the member {name}"
                )
            value = get(spec.key, destination.ptr, destination.size)
            return lambda: destination if value is None else value
        into = _bytes_at(destination.ptr, spec.nbytes)
        self._read(spec, 0, into, is_registered=not self._bundles.objects.is_native)

        def finish() -> Any:
            if spec.extra.get("kind") != "tensor":
                return destination
            metadata = tensor_format.TensorMetadata.decode(into.data, total=spec.nbytes)
            return memory.restore(into.data, metadata)

        return finish

    def _pickled_tensor(
        self,
        name: str,
        spec: PayloadSpec,
        rows: Array | StructuredMemberSlice | None,
        destination: Any,
    ) -> Pending:
        """Plan the read of a tensor as `torch.save` writes it."""
        if destination is not None:
            raise ValueError(
                f"structured tensor member {name} is pickled and does not support destinations"
            )
        data = self._allocate(spec, spec.nbytes, is_member=False)
        self._read(spec, 0, data)

        def finish() -> Any:
            value = load_pickled(name, data)
            chosen = _row_numbers(rows, tuple(value.shape), "structured tensor")
            return value if chosen is None else value[chosen]

        return finish

    def _tensor_into(
        self,
        name: str,
        spec: PayloadSpec,
        kind: TensorField,
        rows: Array | None,
        shape: tuple[int, ...],
        destination: Any,
    ) -> Pending:
        """Plan the read of a tensor into memory: elements, or metadata and elements."""
        itemsize = kind.dtype.itemsize
        nbytes = math.prod(shape) * itemsize
        is_registered = False
        to: Array | None = None
        if isinstance(destination, RawDestination | TensorObjectBuffer):
            _check_size(name, destination, METADATA_BYTES + nbytes)
            head = tensor_format.TensorMetadata(kind.dtype, shape, shape).encode()
            ctypes.memmove(destination.ptr, head, METADATA_BYTES)
            into = _bytes_at(destination.ptr + METADATA_BYTES, nbytes)
            is_registered = getattr(destination, "pre_registered", False)
            if not self._bundles.objects.is_native:
                # Other stores know registered memory by its beginning, where the metadata are.
                to, into = into, np.empty(nbytes, dtype=np.uint8)
                is_registered = False
        else:
            into = _tensor_bytes(name, destination, kind, shape)
        data = self._rows(
            spec, METADATA_BYTES, rows, kind.shape, itemsize, into, is_registered=is_registered
        )

        def finish() -> Any:
            data()
            if to is not None:
                to[:] = into
            return destination

        return finish

    def _nested(
        self,
        name: str,
        spec: PayloadSpec,
        field: Mapping[str, Any],
        rows: Array | StructuredMemberSlice | None,
        destination: Any,
    ) -> Pending:
        if destination is not None:
            raise ValueError(
                f"structured nested tensor member {name} does not support destinations"
            )
        data = self.data(spec)

        def finish() -> Any:
            value = decode_nested(name, field, data)
            chosen = _row_numbers(rows, (len(value),), "structured nested tensor")
            return value if chosen is None else select_nested(value, chosen.tolist())

        return finish

    def _rows(
        self,
        spec: PayloadSpec,
        offset: int,
        rows: Array | None,
        shape: tuple[int, ...],
        itemsize: int,
        into: Array | None = None,
        *,
        is_registered: bool = False,
    ) -> Callable[[], Array]:
        """Plan the read of rows; the result returns their bytes.

        Args:
            spec: The payload.
            offset: Offset of the first row.
            rows: Numbers of the rows; None for all.
            shape: Shape of the whole member.
            itemsize: Length of an item in bytes.
            into: Memory that receives the rows.
            is_registered: True if that memory is registered.
        """
        row_bytes = math.prod(shape[1:]) * itemsize
        nbytes = math.prod(shape) * itemsize if rows is None else len(rows) * row_bytes
        data = self._allocate(spec, nbytes) if into is None else into
        if rows is None:
            self._read(spec, offset, data, is_registered=is_registered, is_array=True)
            return lambda: data
        spans = row_spans(rows, row_bytes)
        if spans is None:
            span = covering_span(rows)
            whole = self._allocate(spec, span.count * row_bytes, is_member=False)
            self._read(spec, offset + span.first * row_bytes, whole)
            table = (span.count, row_bytes)

            def gather() -> Array:
                data.reshape(len(rows), row_bytes)[:] = whole.reshape(table)[rows - span.first]
                return data

            return gather
        is_registered = is_registered or is_leased(data)
        for span in spans:
            part = data[span.at * row_bytes : (span.at + span.count) * row_bytes]
            self._read(
                spec,
                offset + span.first * row_bytes,
                part,
                is_registered=is_registered,
                is_array=True,
            )
        return lambda: data

    def _described(self, spec: PayloadSpec) -> dict[str, Any]:
        head = np.empty(METADATA_BYTES, dtype=np.uint8)
        reads = payload_reads(spec, 0, METADATA_BYTES, head.__array_interface__["data"][0])
        self._bundles.objects.read(reads)
        metadata = tensor_format.TensorMetadata.decode(head.data, total=spec.nbytes)
        return {"dtype": metadata.dtype.name, "shape": list(metadata.local_shape)}

    def _allocate(self, spec: PayloadSpec, nbytes: int, *, is_member: bool = True) -> Array:
        """Return memory for a part of a payload.

        Args:
            spec: The payload.
            nbytes: Length of the memory.
            is_member: True if it will be an array or bytes of a result.
        """
        if nbytes:
            self._bundles.objects.check_sizes(spec.chunks, spec.nbytes)
        return self._results.allocate(nbytes, is_member=is_member)

    def _read(
        self,
        spec: PayloadSpec,
        offset: int,
        into: Array,
        *,
        is_registered: bool = False,
        is_array: bool = False,
    ) -> None:
        if into.nbytes:
            address = into.__array_interface__["data"][0]
            self._reads += payload_reads(
                spec,
                offset,
                into.nbytes,
                address,
                is_registered=is_registered or is_leased_address(address),
                is_array=is_array,
            )


def _row_numbers(
    rows: Array | StructuredMemberSlice | None, shape: tuple[int, ...], what: str
) -> Array | None:
    if rows is None:
        return None
    if not shape:
        raise ValueError(f"{what} slicing requires at least one dimension")
    if isinstance(rows, StructuredMemberSlice):
        return sliced_rows(rows, shape[0], what)
    if len(rows) and int(rows.max()) >= shape[0]:
        raise ValueError(f"row {int(rows.max())} is outside of a member with {shape[0]} rows")
    return rows


def _check_size(name: str, destination: RawDestination | TensorObjectBuffer, nbytes: int) -> None:
    if destination.size < nbytes:
        raise ValueError(
            f"structured field {name}: the destination has {destination.size} bytes, expected at "
            f"least {nbytes}"
        )


def _bytes_at(address: int, nbytes: int) -> Array:
    if nbytes == 0:
        return np.empty(0, dtype=np.uint8)
    view = memoryview(memory.at_address(address, nbytes)).cast("B")
    return np.frombuffer(view, dtype=np.uint8)


def _tensor_bytes(name: str, destination: Any, kind: TensorField, shape: tuple[int, ...]) -> Array:
    """Return the memory of a tensor that is a destination."""
    torch = dtypes.load_torch()
    if not isinstance(destination, torch.Tensor):
        raise ValueError(
            f"structured tensor member {name} only supports a torch.Tensor, tensor_object_buffer "
            "or raw_destination destinations"
        )
    field = f"structured tensor member {name} destination"
    if destination.dtype != kind.dtype.torch() or tuple(destination.shape) != shape:
        raise ValueError(
            f"{field} mismatch: expected {kind.dtype.name} {shape}, got {destination.dtype} "
            f"{tuple(destination.shape)}"
        )
    if destination.device.type != "cpu" or not destination.is_contiguous():
        raise ValueError(f"{field} must be contiguous memory of the host")
    return _bytes_at(destination.data_ptr(), destination.nbytes)
