"""Files of `with` blocks that fail, of handlers and of reports: which of them are published."""

from __future__ import annotations

import contextlib
import io
import weakref

import pytest

import mooncake

file_systems = pytest.importorskip("file_systems")

fs = file_systems.fs
fsspec = file_systems.fsspec
leave_pools = file_systems.leave_pools
write_and_fail = file_systems.write_and_fail


def test_failed_blocks_publish_nothing(store, fs):
    fs.pipe_file("x", b"old")
    for size in (None, 100):
        file = fs.open("x", "wb", size=size)
        with pytest.raises(RuntimeError), file:
            write_and_fail(file)
        assert file.closed
        assert store.get("x") == b"old"
    # No write is left open.
    with fs.open("x", "wb", size=3) as file:
        file.write(b"new")
    assert store.get("x") == b"new"


@pytest.mark.parametrize("mode", ["w", "wb"])
def test_failed_blocks_of_wrappers_publish_nothing(store, fs, mode):
    fs.pipe_file("x", b"old")
    url = f"mooncake://{store.master_address}/x"
    wrappers = [
        lambda: fsspec.open(url, mode),
        lambda: fs.open("x", mode),
        lambda: contextlib.closing(fs.open("x", mode)),
    ]
    data = "half" if mode == "w" else b"half"
    for wrapper in wrappers:
        with pytest.raises(RuntimeError), wrapper() as file:
            write_and_fail(file, data)
        assert store.get("x") == b"old"
    file = fs.open("x", mode)
    with pytest.raises(RuntimeError), contextlib.ExitStack() as stack:
        write_and_fail(stack.enter_context(contextlib.closing(file)), data)
    assert store.get("x") == b"old"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda fs: io.TextIOWrapper(fs.store.file("x", "wb")),
        lambda fs: io.BufferedWriter(fs.store.file("x", "wb")),
        lambda fs: io.TextIOWrapper(io.BufferedWriter(fs.store.file("x", "wb"))),
        lambda fs: contextlib.closing(io.TextIOWrapper(fs.store.file("x", "wb"))),
        lambda fs: fs.open("x", "wb", compression="gzip"),
        lambda fs: fs.open("x", "wt", compression="bz2"),
        lambda fs: fs.open("x", "wb", compression="zip"),
    ],
    ids=["text", "buffer", "both", "closing", "gzip", "text of bz2", "zip"],
)
def test_failed_blocks_of_io_publish_nothing(store, fs, wrap):
    store.put("x", b"old")
    with pytest.raises(RuntimeError), wrap(fs) as file:
        write_and_fail(file, "half" if isinstance(file, io.TextIOBase) else b"half")
    assert store.get("x") == b"old"
    with wrap(fs) as file:
        file.write("new" if isinstance(file, io.TextIOBase) else b"new")
    assert store.get("x") != b"old"


class Report:
    """Writes the error of its block to a file, and closes the file."""

    def __init__(self, file, data=b"error", end=lambda file: None) -> None:
        self.file, self.data, self.end = file, data, end

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, traceback) -> None:
        self.file.write(self.data)
        self.end(self.file)
        self.file.close()


def test_reports_of_failing_blocks_are_not_dropped_silently(store):
    store.put("x", b"old")
    for wrap, data in ((lambda file: file, b"error"), (io.TextIOWrapper, "error")):
        file = wrap(store.file("x", "wb"))
        refused = pytest.raises(mooncake.InvalidArgumentError, match="commit")
        with refused as caught, Report(file, data):
            raise RuntimeError
        assert isinstance(caught.value.__context__, RuntimeError)
        assert file.closed
        assert store.get("x") == b"old"
    with Report(store.file("x", "wb")):
        pass
    assert store.get("x") == b"error"


def test_report_is_published_by_commit(store):
    file = store.file("x", "wb")
    file.write(b"line, ")
    with pytest.raises(RuntimeError), Report(file, end=lambda file: file.commit()):
        raise RuntimeError
    assert store.get("x") == b"line, error"


def test_block_that_ends_well_in_a_failing_one_publishes(store):
    file = store.file("x", "wb")

    @contextlib.contextmanager
    def reporting():
        try:
            yield
        finally:
            with file:
                file.write(b"report")

    with pytest.raises(RuntimeError), reporting():
        raise RuntimeError
    assert store.get("x") == b"report"


def test_files_of_handlers_are_published(store, fs):
    class Reporting:
        """Reports a failure when its block ends."""

        def __enter__(self) -> None:
            pass

        def __exit__(self, kind, error, traceback) -> None:
            report = fs.open("by_exit", "wb")
            report.write(b"1")
            report.close()
            with fsspec.open(f"mooncake://{store.master_address}/by_block", "w") as file:
                file.write("2")

    early = fs.open("by_handler", "wb")
    with pytest.raises(RuntimeError), Reporting():
        raise RuntimeError
    try:
        raise RuntimeError
    except RuntimeError:
        early.write(b"3")
        early.close()
    assert [store.get(key) for key in ("by_exit", "by_block", "by_handler")] == [b"1", b"2", b"3"]


@pytest.mark.parametrize("size", [None, 8])
def test_forgotten_files_publish_nothing(fs, size):
    file = fs.open("x", "wb", size=size)
    file.write(b"half")
    told = weakref.ref(file)
    with pytest.warns(ResourceWarning, match="unclosed"):
        del file
    assert told() is None
    assert not fs.exists("x")
