"""The behaviour suite that fsspec has for every file system: copies, gets, puts, opens, pipes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import MIB

import mooncake

fsspec = pytest.importorskip("fsspec", reason="needs fsspec: pip install fsspec")
abstract = pytest.importorskip("fsspec.tests.abstract")


class Fixtures(abstract.AbstractFixtures):
    """The file system that the suite runs on."""

    @pytest.fixture(scope="class")
    @classmethod
    def fs(cls) -> Iterator[Any]:
        config = mooncake.StoreConfig(segment_bytes=64 * MIB)
        with mooncake.Store(config=config) as store:
            yield fsspec.filesystem("mooncake", store=store)

    @pytest.fixture
    def fs_path(self) -> str:
        return "root"

    @pytest.fixture
    def supports_empty_directories(self) -> bool:
        return False


class TestCopy(abstract.AbstractCopyTests, Fixtures):
    pass


class TestGet(abstract.AbstractGetTests, Fixtures):
    pass


class TestPut(abstract.AbstractPutTests, Fixtures):
    pass


class TestOpen(abstract.AbstractOpenTests, Fixtures):
    pass


class TestPipe(abstract.AbstractPipeTests, Fixtures):
    pass
