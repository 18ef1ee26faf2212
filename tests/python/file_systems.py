"""Fixtures of tests of files: a file system over a store, and writes into it."""

from __future__ import annotations

import pytest

fsspec = pytest.importorskip("fsspec", reason="needs fsspec: pip install fsspec")

from mooncake.files import stores  # noqa: E402 - imports fsspec


@pytest.fixture(autouse=True)
def leave_pools():
    """Close the connections that are shared, whose pools end with each test."""
    yield
    for store in stores._stores.values():
        store.close()
    stores._stores.clear()


@pytest.fixture
def fs(store):
    return fsspec.filesystem("mooncake", store=store)


def write(fs, *paths: str) -> None:
    for path in paths:
        fs.pipe_file(path, path.encode())


def write_and_fail(file, data=b"half") -> None:
    file.write(data)
    raise RuntimeError
