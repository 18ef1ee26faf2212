"""Mounts a directory as a FUSE file system that takes some time for each read.

    python benches/programs/slow_files.py SOURCE TARGET [--delay-ms 2]

The files are those of SOURCE; any number of reads is delayed at the same time. Runs as root
until it is interrupted, or until TARGET is unmounted. For measurements as
`python benches/programs/disk_tier.py TARGET --total 256`, with `MOONCAKE_OFFLOAD_USE_URING` set
to 1 (a ring) or 0 (threads).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import heapq
import os
import select
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path

REQUEST_BYTES = (1 << 20) + 4096
IN_FLIGHT = 256
# FUSE_ASYNC_READ, FUSE_BIG_WRITES, FUSE_ASYNC_DIO, FUSE_PARALLEL_DIROPS, FUSE_MAX_PAGES.
FLAGS = 1 << 0 | 1 << 5 | 1 << 15 | 1 << 18 | 1 << 22
ROOT = 1
READ = 15
Reply = bytes | bytearray


class SlowFiles:
    """The files of a directory, by the numbers that the kernel knows them by."""

    def __init__(self, source: Path, device: int, delay: float) -> None:
        self._device = device
        self._delay = delay
        self._paths = {ROOT: str(source)}
        self._numbers = {str(source): ROOT}
        self._waiting: list[tuple[float, int, int, Callable[[], Reply]]] = []
        self._count = 0
        self._calls = {
            1: self._lookup, 3: self._attributes, 4: self._set_attributes, 9: self._make_directory,
            10: self._unlink, 11: self._remove_directory, 12: self._rename, 14: self._open,
            READ: self._read, 16: self._write, 17: self._statfs, 18: self._close, 20: self._sync,
            25: self._nothing, 26: self._init, 27: self._open_directory, 28: self._list,
            29: self._nothing, 30: self._nothing, 35: self._create, 38: self._nothing,
            43: self._allocate, 45: self._rename_with_flags,
        }  # fmt: skip

    def run(self) -> None:
        """Answer requests until the file system is unmounted."""
        poll = select.poll()
        poll.register(self._device, select.POLLIN)
        while True:
            timeout = None
            if self._waiting:
                timeout = max(0.0, (self._waiting[0][0] - time.monotonic()) * 1e3)
            if poll.poll(timeout) and not self._take():
                return
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, _, unique, call = heapq.heappop(self._waiting)
                self._answer(unique, call)

    def _take(self) -> bool:
        try:
            request = os.read(self._device, REQUEST_BYTES)
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN)
        _, opcode, unique, node = struct.unpack_from("<IIQQ", request)
        body = request[40:]
        if opcode in (2, 36, 42):  # FORGET, INTERRUPT, BATCH_FORGET have no answer.
            return True
        handler = self._calls.get(opcode)
        self._count += 1
        due = time.monotonic() + (self._delay if opcode == READ else 0)

        def call() -> Reply:
            if handler is None:
                raise OSError(errno.ENOSYS, "not known")
            return handler(node, body)

        heapq.heappush(self._waiting, (due, self._count, unique, call))
        return True

    def _answer(self, unique: int, call: Callable[[], Reply]) -> None:
        try:
            reply, code = call(), 0
        except OSError as error:
            reply, code = b"", -(error.errno or errno.EIO)
        head = struct.pack("<IiQ", 16 + len(reply), code, unique)
        # The caller of an interrupted request may be gone.
        with contextlib.suppress(OSError):
            os.writev(self._device, [head, reply])

    def _path(self, node: int, name: bytes) -> str:
        return os.path.join(self._paths[node], os.fsdecode(name.rstrip(b"\0")))

    def _attribute(self, path: str | int) -> bytes:
        found = os.lstat(path) if isinstance(path, str) else os.fstat(path)
        times = (int(found.st_atime), int(found.st_mtime), int(found.st_ctime))
        numbers = (found.st_ino, found.st_size, found.st_blocks, *times)
        owner = (found.st_mode, found.st_nlink, found.st_uid, found.st_gid)
        return struct.pack("<6Q10I", *numbers, 0, 0, 0, *owner, 0, 4096, 0)

    def _entry(self, path: str) -> bytes:
        attribute = self._attribute(path)
        number = self._numbers.setdefault(path, len(self._numbers) + 1)
        self._paths[number] = path
        return struct.pack("<4Q2I", number, 0, 0, 0, 0, 0) + attribute

    def _init(self, _: int, body: bytes) -> Reply:
        _, _, readahead, flags = struct.unpack_from("<4I", body)
        limits = struct.pack("<2H2I2H", IN_FLIGHT, IN_FLIGHT, 1 << 20, 1, 256, 0)
        return struct.pack("<4I", 7, 31, readahead, flags & FLAGS) + limits + bytes(32)

    def _lookup(self, node: int, body: bytes) -> Reply:
        return self._entry(self._path(node, body))

    def _attributes(self, node: int, _: bytes) -> Reply:
        return bytes(16) + self._attribute(self._paths[node])

    def _set_attributes(self, node: int, body: bytes) -> Reply:
        valid, _, _, size = struct.unpack_from("<2I2Q", body)
        if valid & 8:
            os.truncate(self._paths[node], size)
        return self._attributes(node, body)

    def _make_directory(self, node: int, body: bytes) -> Reply:
        path = self._path(node, body[8:])
        os.mkdir(path, 0o700)
        return self._entry(path)

    def _unlink(self, node: int, body: bytes) -> Reply:
        os.unlink(self._path(node, body))
        self._numbers.pop(self._path(node, body), None)
        return b""

    def _remove_directory(self, node: int, body: bytes) -> Reply:
        os.rmdir(self._path(node, body))
        self._numbers.pop(self._path(node, body), None)
        return b""

    def _rename(self, node: int, body: bytes, head: int = 8) -> Reply:
        (directory,) = struct.unpack_from("<Q", body)
        old, new = body[head:].split(b"\0")[:2]
        source, target = self._path(node, old), self._path(directory, new)
        os.rename(source, target)
        self._numbers.pop(target, None)
        if (number := self._numbers.pop(source, None)) is not None:
            self._numbers[target] = number
            self._paths[number] = target
        return b""

    def _rename_with_flags(self, node: int, body: bytes) -> Reply:
        return self._rename(node, body, 16)

    def _open(self, node: int, body: bytes) -> Reply:
        (flags,) = struct.unpack_from("<I", body)
        # What is read from the source is to be limited by the delay only.
        file = os.open(self._paths[node], flags & ~(os.O_DIRECT | os.O_CREAT | os.O_EXCL))
        return struct.pack("<QII", file, 0, 0)

    def _create(self, node: int, body: bytes) -> Reply:
        flags, mode = struct.unpack_from("<2I", body)
        path = self._path(node, body[16:])
        file = os.open(path, (flags | os.O_CREAT) & ~os.O_DIRECT, stat.S_IMODE(mode))
        return self._entry(path) + struct.pack("<QII", file, 0, 0)

    def _read(self, _: int, body: bytes) -> Reply:
        file, offset, size = struct.unpack_from("<QQI", body)
        return os.pread(file, size, offset)

    def _write(self, _: int, body: bytes) -> Reply:
        file, offset, size = struct.unpack_from("<QQI", body)
        return struct.pack("<II", os.pwrite(file, memoryview(body)[40 : 40 + size], offset), 0)

    def _statfs(self, node: int, _: bytes) -> Reply:
        found = os.statvfs(self._paths[node])
        counts = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("<5Q4I", *counts, found.f_bsize, 255, found.f_frsize, 0) + bytes(24)

    def _close(self, _: int, body: bytes) -> Reply:
        os.close(struct.unpack_from("<Q", body)[0])
        return b""

    def _sync(self, _: int, body: bytes) -> Reply:
        os.fdatasync(struct.unpack_from("<Q", body)[0])
        return b""

    def _allocate(self, _: int, body: bytes) -> Reply:
        file, offset, length, mode = struct.unpack_from("<3QI", body)
        if mode != 0:
            raise OSError(errno.EOPNOTSUPP, "no such mode")
        os.posix_fallocate(file, offset, length)
        return b""

    def _nothing(self, _node: int, _body: bytes) -> Reply:
        return b""

    def _open_directory(self, _node: int, _body: bytes) -> Reply:
        return bytes(16)

    def _list(self, node: int, body: bytes) -> Reply:
        _, offset, size = struct.unpack_from("<QQI", body)
        names = sorted(os.listdir(self._paths[node]))
        reply = bytearray()
        for at, name in enumerate(names[offset:], offset + 1):
            encoded = os.fsencode(name)
            entry = struct.pack("<QQII", at + 1, at, len(encoded), 0) + encoded
            entry += bytes(-len(entry) % 8)
            if len(reply) + len(entry) > size:
                break
            reply += entry
        return reply


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--delay-ms", type=float, default=2.0, help="the time of each read")
    options = parser.parse_args()
    device = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    target = os.fsencode(options.target)
    text = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"slow", target, b"fuse.slow", 0, text) != 0:
        raise SystemExit(f"slow_files: cannot mount: {os.strerror(ctypes.get_errno())}")
    try:
        SlowFiles(options.source.resolve(), device, options.delay_ms / 1e3).run()
    except KeyboardInterrupt:
        pass
    finally:
        libc.umount2(target, 2)


if __name__ == "__main__":
    main()
