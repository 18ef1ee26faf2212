"""Objects as binary files of Python, open for reading or for writing."""

from __future__ import annotations

import contextlib
import io
import opcode
import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from mooncake._api.blocking.puts import put_bytes
from mooncake._api.empty import EMPTY_VALUE, is_version_empty, with_empty_mark
from mooncake._api.outcomes import only
from mooncake._api.pieces import CHUNK_BYTES, Pieces, bytes_of
from mooncake._api.reserved import Reservation
from mooncake._runtime import _native
from mooncake.errors import AlreadyExistsError, MooncakeError

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from typing_extensions import Buffer

    from mooncake._api.blocking.ranges import ObjectReader, RangeCalls
    from mooncake._api.native_calls import Located, Native
    from mooncake._api.types import Key
    from mooncake._runtime import PutOptions

__all__ = ["FileReader", "FileWriter", "Target", "already_exists", "opened_reader"]

_ALREADY_EXISTS = -705
_INVALID_PARAMS = -600
# Calls between the end of a block and that of a file in it.
_FRAMES_MAX = 16
_EXITS = ("__exit__", "__aexit__")
_EXIT_OF_FAILING_BLOCK = opcode.opmap["WITH_EXCEPT_START"]
# Besides the standard library: what closes a file of a failing block because the block fails.
_WRAPPERS = ("fsspec", "mooncake")


class FileReader(io.BufferedReader):
    """A binary file that is open for reading: one version of an object.

    Reads of at least the length of the buffer go straight into the memory of their caller.
    """

    def __init__(
        self, native: Native, located: Located | None, key: Key, buffer_bytes: int
    ) -> None:
        """Make a file at the beginning of a located object; None is an empty file."""
        self._native = native
        self._located = located
        self._buffer_bytes = buffer_bytes
        super().__init__(_RawReader(native, located, key), buffer_bytes)

    @property
    def size(self) -> int:
        """Length of the file in bytes."""
        return self._located.size if self._located is not None else 0

    @property
    def version(self) -> int | None:
        """Number of the version that is read; None for an empty file."""
        return self._located.version if self._located is not None else None

    def read(self, size: int | None = -1, /) -> bytes:
        """Read at most `size` bytes, or all that are left; empty at the end."""
        at = self.tell()
        left = max(self.size - at, 0)
        length = left if size is None or size < 0 else min(size, left)
        if length < self._buffer_bytes or self._located is None:
            return super().read(length)
        # `BufferedReader` would fill memory that it makes itself, in several times the time.
        read = self._native.read_located(self._located, at, length)
        self.seek(at + length)
        return read


class _RawReader(io.RawIOBase):
    """The file below the buffer of a `FileReader`."""

    def __init__(self, native: Native, located: Located | None, key: Key) -> None:
        super().__init__()
        self.name = key
        self._native = native
        self._located = located
        self._size = located.size if located is not None else 0
        self._position = 0

    def readable(self) -> bool:
        """Return true."""
        return True

    def seekable(self) -> bool:
        """Return true."""
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        """Fill the buffer as far as there are bytes."""
        self._checkClosed()
        with memoryview(buffer) as view, view.cast("B") as whole:
            length = min(max(self._size - self._position, 0), len(whole))
            if length > 0 and self._located is not None:
                with whole[:length] as part:
                    self._native.read_located_into(self._located, self._position, part)
        self._position += length
        return length

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Set the position and return it."""
        self._checkClosed()
        if whence not in (io.SEEK_SET, io.SEEK_CUR, io.SEEK_END):
            raise ValueError(f"whence is 0, 1 or 2, not {whence}")
        position = (0, self._position, self._size)[whence] + offset
        if position < 0:
            raise ValueError(f"the position would be negative: {position}")
        self._position = position
        return position

    def tell(self) -> int:
        """Return the position."""
        self._checkClosed()
        return self._position


def opened_reader(
    store: RangeCalls, key: Key, buffer_bytes: int, timeout_s: float | None = None
) -> FileReader:
    """Open a file for reading.

    Raises:
        NotFoundError: The object does not exist.
    """
    while True:
        reader: ObjectReader = store.reader(key, timeout_s=timeout_s)
        native, located = reader._native, reader._located
        is_empty = is_version_empty(native, key, located.size, located.version)
        # An object that was replaced meanwhile is located again.
        if is_empty is not None:
            return FileReader(native, None if is_empty else located, key, buffer_bytes)


@dataclass(frozen=True, slots=True)
class Target:
    """The object that a file is written to.

    Attributes:
        native: The native store.
        key: Key of the object.
        options: Copies, pins, placement, tags, expiry.
        overwrite: Whether an existing object is replaced; otherwise it is an error.
    """

    native: Native
    key: Key
    options: PutOptions | None = None
    overwrite: bool = True


def already_exists(key: Key) -> MooncakeError:
    """Return the failure for a file that exists and is not to be replaced."""
    failure = _native.failure(
        _ALREADY_EXISTS,
        "the file exists already",
        context={"key": key},
        remedy="Open it in mode 'wb', which replaces it, or choose another key.",
    )
    failure.key = key
    return failure


class _Gathered:
    """A file of any length: the bytes stay in this process until they are put at once."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._pieces = Pieces()

    @property
    def total(self) -> int:
        return self._pieces.total

    def append(self, piece: memoryview) -> None:
        self._pieces.append(piece)

    def publish(self) -> None:
        target, parts, options = self._target, self._pieces.parts(), self._target.options
        value: Any = parts
        if not parts:
            value, options = EMPTY_VALUE, with_empty_mark(options)
        try:
            outcomes = put_bytes(
                lambda: target.native,
                [target.key],
                [value],
                options=options,
                is_upsert=target.overwrite,
            )
            is_stored = only(outcomes)
        finally:
            self.discard()
        if not is_stored:
            raise already_exists(target.key)

    def discard(self) -> None:
        self._pieces.clear()


class _Reserved:
    """A file of a known length: the bytes go to the pool as they come."""

    def __init__(self, target: Target, size: int) -> None:
        self.total = 0
        self._chunk = memoryview(bytearray(min(CHUNK_BYTES, size)))
        self._used = 0
        try:
            self._space = Reservation(
                target.native,
                target.key,
                size,
                options=target.options,
                overwrite=target.overwrite,
            )
        except AlreadyExistsError as error:
            if target.overwrite:
                raise
            raise already_exists(target.key) from error

    def append(self, piece: memoryview) -> None:
        length = len(piece)
        if self._used + length > len(self._chunk):
            self._send_chunk()
        if length >= len(self._chunk):
            self._send(piece, self.total)
        else:
            self._chunk[self._used : self._used + length] = piece
            self._used += length
        self.total += length

    def publish(self) -> None:
        try:
            self._send_chunk()
        except BaseException:
            self.discard()
            raise
        self._space.publish()

    def discard(self) -> None:
        self._space.revoke()

    def _send_chunk(self) -> None:
        if self._used:
            self._send(self._chunk[: self._used], self.total - self._used)
            self._used = 0

    def _send(self, piece: memoryview, offset: int) -> None:
        address, length = _native.readable_range(piece)
        self._space.write(address, length, offset)


class FileWriter(io.BufferedIOBase):
    """A binary file that is open for writing: an object that is published when the file is closed.

    Until then readers find the object that was there before. A `with` block that fails publishes
    nothing, nor does a file that is never closed. Other calls of `close` publish, also those in an
    ``except`` or ``finally`` clause.
    """

    def __init__(
        self, target: Target, size: int | None = None, *, is_published_by_close: bool = True
    ) -> None:
        """Open a file for writing.

        Args:
            target: The object.
            size: Length, if it is known; the bytes then go to the pool as they come.
            is_published_by_close: Publish the object in `close`; otherwise in `commit`.
        """
        super().__init__()
        self.name = target.key
        self.mode = "wb" if target.overwrite else "xb"
        self._is_published_by_close = is_published_by_close
        self._size = size
        self._error_at_open = sys.exc_info()[1]
        self._error_at_write: BaseException | None = None
        self._is_decided = True
        self._sink: _Gathered | _Reserved = _Reserved(target, size) if size else _Gathered(target)
        self._is_decided = False

    def writable(self) -> bool:
        """Return true."""
        return True

    def write(self, data: Buffer, /) -> int:
        """Append contiguous bytes and return their number.

        Long ``bytes``, and views of ``bytes``, are kept until the file is closed instead of being
        copied.
        """
        self._check_open()
        piece = bytes_of(data)
        total = self._sink.total + len(piece)
        if self._size is not None and total > self._size:
            raise self._wrong_length("more bytes are written than the size that was given", total)
        self._sink.append(piece)
        self._error_at_write = sys.exc_info()[1]
        return len(piece)

    def tell(self) -> int:
        """Return the number of bytes that were written."""
        self._check_open()
        return self._sink.total

    def close(self) -> None:
        """Publish the object and close the file. Idempotent.

        Raises:
            NoSpaceError: The pool has no space for the object.
            AlreadyExistsError: An object is not to be replaced, and there is one.
            InvalidArgumentError: A `with` block failed, and its ``__exit__`` wrote to the file and
                closed it. Call `commit` or `discard` there.
        """
        if self.closed:
            return
        error = sys.exc_info()[1]
        # A file that was opened while the exception was handled is closed by the handler itself.
        if error is None or error is self._error_at_open or self._is_decided:
            self._end()
            return
        closers = _closers_of_failing_block(error)
        if closers is None:
            self._end()
            return
        is_written_since = self._error_at_write is error
        self.discard()
        if is_written_since and not all(map(_is_wrapper, closers)):
            raise _native.failure(
                _INVALID_PARAMS,
                "a file was written to and closed at the end of a block that failed, and may be "
                "a part; nothing was stored",
                context={"key": self.name},
                remedy="Call commit() to publish the file before it is closed, or discard().",
            )

    def commit(self) -> None:
        """Publish the object; nothing can be written after that. Idempotent."""
        if self._is_decided:
            return
        total = self._sink.total
        if self._size not in (None, total):
            self._drop()
            text = "fewer bytes were written than the size that was given; nothing was stored"
            raise self._wrong_length(text, total)
        self._is_decided = True
        self._sink.publish()

    def discard(self) -> None:
        """Close the file without publishing an object. Idempotent."""
        self._error_at_open = self._error_at_write = None
        try:
            self._drop()
        finally:
            super().close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> Literal[None]:
        if kind is not None:
            self.discard()
        elif not self.closed:
            self._end()

    def __del__(self) -> None:
        # `IOBase` would close the file, which would publish a part of it.
        if getattr(self, "_is_decided", True):
            return
        if not self.closed:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
        # The store may be closed by now, or belong to the parent of a fork.
        with contextlib.suppress(MooncakeError):
            self.discard()

    def __repr__(self) -> str:
        return f"<mooncake file name={self.name!r} mode={self.mode!r}>"

    def _check_open(self) -> None:
        if self.closed or self._is_decided:
            raise ValueError("I/O operation on closed file")

    def _end(self) -> None:
        """Publish the object, unless another call does, and close the file."""
        self._error_at_open = self._error_at_write = None
        try:
            if self._is_published_by_close:
                self.commit()
        finally:
            super().close()

    def _drop(self) -> None:
        if not self._is_decided:
            self._is_decided = True
            self._sink.discard()

    def _wrong_length(self, text: str, written: int) -> MooncakeError:
        context = {"key": self.name, "size": self._size, "written": written}
        return _native.failure(_INVALID_PARAMS, text, context=context)


def _closers_of_failing_block(error: BaseException) -> list[FrameType] | None:
    """Return the calls by which the end of a failing `with` block closes a file; None if none does.

    The files of `io` and of fsspec that wrap another one close it without saying why. Their caller
    is the `with` statement itself, or an ``__exit__`` that has the exception as an argument.

    Args:
        error: The exception that is handled.
    """
    frame: FrameType | None = sys._getframe(2)
    closers: list[FrameType] = []
    while frame is not None and len(closers) < _FRAMES_MAX:
        if _is_at_exit(frame):
            return closers
        closers.append(frame)
        if frame.f_code.co_name in _EXITS:
            values = frame.f_locals.values()
            is_told = any(
                each is error
                for value in values
                for each in (value if isinstance(value, tuple) else (value,))
            )
            return closers if is_told or _is_at_exit(frame.f_back) else None
        frame = frame.f_back
    return None


def _is_at_exit(frame: FrameType | None) -> bool:
    """Return whether the call that a frame is making is that of an ``__exit__`` with an error."""
    if frame is None or frame.f_lasti < 0:
        return False
    return frame.f_code.co_code[frame.f_lasti] == _EXIT_OF_FAILING_BLOCK


def _is_wrapper(frame: FrameType) -> bool:
    """Return whether a call is one of a library that closes what it wraps."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in _WRAPPERS or package in sys.stdlib_module_names
