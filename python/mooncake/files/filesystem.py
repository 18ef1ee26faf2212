"""`MooncakeFileSystem`: the pool as a file system of fsspec."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
from collections.abc import Iterator
from typing import Any, TypeVar

from fsspec.asyn import AsyncFileSystem
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.compression import compr
from fsspec.core import get_compression

from mooncake._api.blocking.puts import put_bytes
from mooncake._api.buffers import readable
from mooncake._api.config import with_port
from mooncake._api.files import FileReader, FileWriter, Target, already_exists, opened_reader
from mooncake._api.keywords import suggestion
from mooncake._api.outcomes import only
from mooncake._api.store import Store
from mooncake._api.values import Seconds, with_terms
from mooncake._runtime import PutOptions
from mooncake.errors import AlreadyExistsError, MooncakeError, NotFoundError
from mooncake.files import transfers
from mooncake.files.listing import Entry, entries, entry
from mooncake.files.paths import PROTOCOL, joined_url, names_several, split_url
from mooncake.files.stores import settings, store_at

__all__ = ["MooncakeFileSystem"]

T = TypeVar("T")

_OWN_OPTIONS = ("master", "store", "token", "tenant", "metadata", "options")
_FSSPEC_OPTIONS = (
    *("asynchronous", "batch_size", "loop", "skip_instance_cache"),
    *("listings_expiry_time", "max_paths", "use_listings_cache"),
)
_OF_TEXT = ("encoding", "errors", "newline")
_BUFFER_BYTES = 1 << 20
_REMOVED_AT_A_TIME = 1000


class MooncakeFileSystem(AsyncFileSystem):  # type: ignore[misc]
    """The objects of a pool as files, whose paths are the keys.

    A URL is ``mooncake://HOST:PORT/path``, or ``mooncake:///path`` for the pool that the storage
    options or ``MOONCAKE_MASTER`` name. A directory is what keys have in common before a slash: it
    need not be made, and is gone with its last file. Nothing is cached.

    A file that is written becomes an object when it is closed, and replaces the one before, which
    readers find until then. A file that is read is the version that was there when it was opened.
    """

    protocol = PROTOCOL
    root_marker = ""
    # Connections are shared, see `store_at`; a file system holds nothing else.
    cachable = False

    def __init__(
        self,
        master: str | None = None,
        *,
        store: Store | None = None,
        token: str | None = None,
        tenant: str | None = None,
        metadata: str | None = None,
        options: PutOptions | None = None,
        **fsspec_options: Any,
    ) -> None:
        """Choose the pool; the first call joins it.

        Args:
            master: ``host:port`` of the master; by default ``MOONCAKE_MASTER``.
            store: An open store to use, which stays the caller's to close.
            token: Secret that the master and its clients share; by default
                ``MOONCAKE_MASTER_TOKEN``. It is left out where the file system is pickled.
            tenant: Tenant in whose namespace the paths are.
            metadata: ``"P2PHANDSHAKE"``, or the URL of a metadata server.
            options: Of the files that are written: number of copies, pins, placement.
            fsspec_options: Options that every file system of fsspec has.

        Raises:
            ValueError: A store is given together with what names another pool.
        """
        _check_options(fsspec_options)
        super().__init__(**fsspec_options)
        if store is not None:
            settled = {"token": token, "tenant": tenant, "metadata": metadata}
            named = [name for name, value in settled.items() if value is not None]
            pool = store._pool_address
            if master not in (None, "", pool, store.master_address):
                named.insert(0, f"master={master}")
            if named:
                text = f"store= is a store of the pool at {pool}"
                raise ValueError(f"{text}; leave out {', '.join(named)}")
            master = pool
        self._given = store
        self._master = master or ""
        self._config = settings(token=token, tenant=tenant, metadata=metadata)
        self._options = options
        # Calls on the instance compare the address of a URL with that of the pool.
        self._strip_protocol = self._own_path  # type: ignore[method-assign]

    @property
    def store(self) -> Store:
        """The store that the calls use; the first use joins the pool."""
        return self._given if self._given is not None else store_at(self._master, self._config)

    # Paths

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        """Return the path of a URL, which is the key."""
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return split_url(os.fspath(path))[1]

    def _own_path(self, path: Any) -> Any:
        """Return the path of a URL in this pool.

        Raises:
            ValueError: The URL names another pool.
        """
        if isinstance(path, list):
            return [self._own_path(each) for each in path]
        address, own = split_url(os.fspath(path))
        if address and not self._is_own(address):
            text = f"{path} is in another pool than that of this file system, {self._address}"
            raise ValueError(f"{text}; fsspec.open and fsspec.url_to_fs take the pool of the URL")
        return own

    def _is_own(self, address: str) -> bool:
        """Return whether an address is that of this pool, also that of the master that leads."""
        own, address = self._address, with_port(address)
        if address == with_port(own) or ("," in own and address in map(with_port, own.split(","))):
            return True
        return names_several(own) and address == self.store.master_address

    @property
    def _address(self) -> str:
        return self._master or self.store._pool_address

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        """Return the storage options that a URL has."""
        address, _ = split_url(path)
        return {"master": address} if address else {}

    def unstrip_protocol(self, name: str) -> str:
        """Return the URL of a path, with the address of the master."""
        return joined_url(self._address, self._strip_protocol(name))

    # Queries

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        return await asyncio.to_thread(self.info, path)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return ``name``, ``size``, ``type`` and, of a file, its ``version``.

        Raises:
            FileNotFoundError: There is no such file or directory.
        """
        path = self._strip_protocol(path)
        found = entry(self.store._native, path)
        if found is None:
            raise _not_found(path)
        return _details(found)

    async def _exists(self, path: str, **_: Any) -> bool:
        return await asyncio.to_thread(self.exists, path)

    def exists(self, path: str, **_: Any) -> bool:
        """Return whether there is such a file or directory."""
        return entry(self.store._native, self._strip_protocol(path)) is not None

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        return await asyncio.to_thread(self.ls, path, detail=detail)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Return the files and directories in a directory, or the file itself.

        Raises:
            FileNotFoundError: There is no such file or directory.
        """
        path, native = self._strip_protocol(path), self.store._native
        found = list(entries(native, path, depth=1))
        if not found and path:
            itself = entry(native, path)
            if itself is None:
                raise _not_found(path)
            found = [] if itself.is_directory else [itself]
        return [_details(each) if detail else each.path for each in found]

    async def _find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        prefix: str = "",
        **_: Any,
    ) -> Any:
        path = self._strip_protocol(path)
        found = await asyncio.to_thread(self._found, path, maxdepth, prefix)
        if withdirs and path and found and path not in found:
            found[path] = Entry(path, None)
        names = sorted(name for name, each in found.items() if withdirs or not each.is_directory)
        return {name: _details(found[name]) for name in names} if detail else names

    def _found(self, path: str, depth: int | None, stem: str) -> dict[str, Entry]:
        native = self.store._native
        found: dict[str, Entry] = {}
        for each in entries(native, path, depth=depth, stem=stem):
            # A file comes first if a directory has its path, as in `entry`.
            if not each.is_directory or each.path not in found:
                found[each.path] = each
        if not found:
            itself = entry(native, path)
            if itself is not None and not itself.is_directory:
                found[path] = itself
        return found

    # Reading

    async def _cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        return await asyncio.to_thread(self.cat_file, path, start, end)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """Return the bytes of a file, or a part of them.

        Args:
            path: The file.
            start: First byte; negative counts from the end.
            end: Byte after the last one; negative counts from the end.

        Raises:
            FileNotFoundError: There is no such file.
        """
        path = self._strip_protocol(path)
        with self._as_os_errors(path):
            if start is None and end is None:
                # The whole object is checked against its checksum.
                value = self.store.get(path)
                if len(value) != 1:
                    return value
            with opened_reader(self.store, path, _BUFFER_BYTES) as file:
                first, last, _step = slice(start, end).indices(file.size)
                file.seek(first)
                return file.read(max(last - first, 0))

    async def _get_file(
        self, rpath: str, lpath: str, callback: Any = DEFAULT_CALLBACK, **_: Any
    ) -> None:
        await asyncio.to_thread(self._download, self._strip_protocol(rpath), lpath, callback)

    def _download(self, path: str, local: str, callback: Any) -> None:
        found = entry(self.store._native, path)
        if found is None:
            raise _not_found(path)
        if found.is_directory:
            os.makedirs(local, exist_ok=True)
            return
        callback.set_size(found.size)
        os.makedirs(os.path.dirname(local) or ".", exist_ok=True)
        with self._as_os_errors(path):
            transfers.download(self.store, path, local, moved=callback.relative_update)

    # Writing

    async def _pipe_file(
        self, path: str, value: Any, mode: str = "overwrite", **options: Any
    ) -> None:
        await asyncio.to_thread(self.pipe_file, path, value, mode, **options)

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **options: Any) -> None:
        """Write a file whole.

        Args:
            path: The file.
            value: Its bytes, which are read in place.
            mode: ``"overwrite"``, or ``"create"`` for a file that must not exist.
            options: As of `open`: ``options``, ``ttl_s``, ``tags``.

        Raises:
            FileExistsError: The file exists, with ``"create"``.
        """
        target = self._target(self._strip_protocol(path), mode != "create", **options)
        content = memoryview(readable(value, path))
        with self._as_os_errors(path):
            if not content.nbytes:
                FileWriter(target).close()
                return
            outcomes = put_bytes(
                lambda: target.native,
                [target.key],
                [content],
                options=target.options,
                is_upsert=target.overwrite,
            )
            if not only(outcomes):
                raise already_exists(path)

    async def _put_file(
        self,
        lpath: str,
        rpath: str,
        mode: str = "overwrite",
        callback: Any = DEFAULT_CALLBACK,
        **options: Any,
    ) -> None:
        path = self._strip_protocol(rpath)
        if os.path.isdir(lpath):
            return
        callback.set_size(os.path.getsize(lpath))
        target = self._target(path, mode != "create", **options)
        with self._as_os_errors(path):
            await asyncio.to_thread(
                transfers.upload,
                self.store,
                lpath,
                path,
                options=target.options,
                overwrite=target.overwrite,
                moved=callback.relative_update,
            )

    async def _cp_file(self, path1: str, path2: str, **_: Any) -> None:
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        found = await asyncio.to_thread(entry, self.store._native, source)
        if found is None:
            raise _not_found(source)
        if found.is_directory or source == target:
            return
        with self._as_os_errors(source):
            await asyncio.to_thread(
                transfers.copy, self.store, source, target, options=self._options
            )

    async def _rm_file(self, path: str, **_: Any) -> None:
        await asyncio.to_thread(self.rm_file, path)

    def rm_file(self, path: str) -> None:
        """Remove a file.

        Raises:
            FileNotFoundError: There is no such file.
            BusyError: The file is leased, hard-pinned, or being copied.
        """
        path = self._strip_protocol(path)
        with self._as_os_errors(path):
            self.store.delete(path)

    async def _rm(
        self,
        path: str | list[str],
        recursive: bool = False,
        maxdepth: int | None = None,
        **_: Any,
    ) -> None:
        named = [path] if isinstance(path, str) else path
        named = [self._strip_protocol(each) for each in named]
        paths = await self._expand_path(named, recursive=recursive, maxdepth=maxdepth)
        await asyncio.to_thread(self._remove, paths, set() if recursive else set(named))

    def _remove(self, paths: list[str], named: set[str]) -> None:
        """Remove files; directories among them are an error where the caller named them."""
        for at in range(0, len(paths), _REMOVED_AT_A_TIME):
            deleted = self.store.delete_many(paths[at : at + _REMOVED_AT_A_TIME])
            for reason in deleted.kept.values():
                raise reason
            for missing in named.intersection(deleted.missing):
                if entry(self.store._native, missing) is None:
                    raise _not_found(missing)
                text = "is a directory; rm(path, recursive=True) removes its files"
                raise IsADirectoryError(errno.EISDIR, text, missing)

    # Files

    def open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        cache_options: dict[str, Any] | None = None,
        compression: str | None = None,
        **options: Any,
    ) -> Any:
        """Open a file: binary, text, or compressed, with the arguments of `_open`.

        Args:
            path: The file.
            mode: ``"r"``, ``"w"`` or ``"x"``, with ``"b"`` for bytes.
            block_size: Bytes that are read at a time; larger reads are made directly.
            cache_options: Ignored: the buffer of the file is the only cache.
            compression: Name of a compression of fsspec, or ``"infer"`` for that of the suffix.
            options: Those of `_open`; of a text also ``encoding``, ``errors`` and ``newline``.

        Raises:
            FileNotFoundError: There is no such file to read.
            FileExistsError: There is such a file, for ``"x"``.
        """
        if "b" not in mode:
            of_text = {name: options.pop(name) for name in _OF_TEXT if name in options}
            mode = f"{mode.replace('t', '')}b"
            file = self.open(path, mode, block_size, cache_options, compression, **options)
            return _TextFile(file, **of_text)
        file = super().open(path, mode, block_size, cache_options, **options)
        compression = get_compression(self._strip_protocol(path), compression)
        if compression is None:
            return file
        compressed = compr[compression](file, mode=mode[0])
        _close_with(compressed, file)
        return compressed

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,  # noqa: ARG002 - fsspec passes it
        *,
        size: int | None = None,
        **options: Any,
    ) -> FileReader | FileWriter:
        """Open a file for reading or writing; `open` calls it.

        Args:
            path: The file.
            mode: ``"rb"``, ``"wb"`` or ``"xb"``.
            block_size: Bytes that are read at a time; larger reads are made directly.
            autocommit: Publish a written file when it is closed; otherwise in its ``commit``.
            cache_options: Ignored: the buffer of the file is the only cache.
            size: Length of a file that is written, if it is known; the bytes then go to the pool as
                they come.
            options: Of a file that is written: ``options``, ``ttl_s``, ``tags``.
        """
        with self._as_os_errors(path):
            if mode == "rb":
                return opened_reader(self.store, path, block_size or _BUFFER_BYTES)
            if mode not in ("wb", "xb"):
                text = f"a file of mooncake is opened with 'r', 'w' or 'x', not {mode!r}"
                raise NotImplementedError(f"{text}: objects are replaced as a whole")
            if mode == "xb" and self.exists(path):
                raise already_exists(path)
            target = self._target(path, mode == "wb", **options)
            return FileWriter(target, size, is_published_by_close=autocommit)

    def _target(
        self,
        path: str,
        overwrite: bool,
        *,
        options: PutOptions | None = None,
        ttl_s: Seconds | None = None,
        tags: dict[str, str] | None = None,
    ) -> Target:
        if not path:
            raise IsADirectoryError(errno.EISDIR, "the root is no file; a path is a key", path)
        terms = with_terms(options or self._options, ttl_s=ttl_s, tags=tags)
        return Target(self.store._native, path, terms, overwrite=overwrite)

    @contextlib.contextmanager
    def _as_os_errors(self, path: str) -> Iterator[None]:
        """Raise what Python's file systems raise for missing files, and for those that exist."""
        try:
            yield
        except NotFoundError as error:
            found = entry(self.store._native, path)
            if found is None:
                raise _explained(_not_found(path), error) from error
            if found.is_directory:
                raise IsADirectoryError(errno.EISDIR, "is a directory", path) from error
            # The object exists, and no copy of it can be read.
            raise
        except AlreadyExistsError as error:
            exists = FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            raise _explained(exists, error) from error

    # Other processes

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as storage options; the token stays here, see `Store`."""
        return _reopened, (type(self), self.storage_args, self._portable_options())

    def to_dict(self, *, include_password: bool = True) -> dict[str, Any]:
        """Return the storage options for JSON, without the token."""
        shown = dict(super().to_dict(include_password=include_password))
        for name in ("store", "token", "options"):
            shown.pop(name, None)
        return {**shown, **self._portable_options()}

    def _portable_options(self) -> dict[str, Any]:
        given = {
            name: value
            for name, value in self.storage_options.items()
            if name not in ("store", "token")
        }
        if self._given is None:
            return given
        if self._given._native.is_embedded:
            text = "a file system whose store runs its own pool cannot be sent to another process"
            raise TypeError(f"{text}; use mooncake://{self._master}/ there")
        config = self._given.config
        return {
            **given,
            "master": self._master,
            "tenant": config.tenant,
            "metadata": config.metadata,
        }


def _reopened(
    kind: type[MooncakeFileSystem], args: tuple[Any, ...], options: dict[str, Any]
) -> MooncakeFileSystem:
    return kind(*args, **options)


class _TextFile(io.TextIOWrapper):
    """A text over a file, which tells the file when its block fails."""

    def __exit__(self, *_error: object) -> None:
        # A file that is closed finds the exception in the arguments of this frame.
        self.close()


def _close_with(compressed: Any, file: FileReader | FileWriter) -> None:
    """Let a compressed file close the one below it, which publishes what was written."""
    close = compressed.close

    def close_both() -> None:
        close()
        file.close()

    compressed.close = close_both


def _check_options(given: dict[str, Any]) -> None:
    """Refuse options that neither this file system nor fsspec has."""
    for name in given:
        if name not in _FSSPEC_OPTIONS:
            known = (*_OWN_OPTIONS, *_FSSPEC_OPTIONS)
            end = suggestion(name, known) or f"; there are {', '.join(_OWN_OPTIONS)}"
            raise TypeError(f"mooncake has no storage option {name!r}{end}")


def _details(found: Entry) -> dict[str, Any]:
    kind = "directory" if found.is_directory else "file"
    details: dict[str, Any] = {"name": found.path, "size": found.size or 0, "type": kind}
    if found.version is not None:
        details["version"] = found.version
    return details


def _not_found(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _explained(raised: OSError, failure: MooncakeError) -> OSError:
    """Add what the pool says to the failure of a file system."""
    raised.add_note(str(failure))
    if failure.remedy:
        raised.add_note(failure.remedy)
    return raised
