"""Fixtures of the tests with real engines, which `make test-engines` runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder
