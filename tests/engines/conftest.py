"""Fixtures of the tests with real engines, which `make test-engines` runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from prompts import Answers, computed_answers
from tiny_model import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model."""
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder


@pytest.fixture(scope="session")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """The right tokens for each prompt: those of a server without a connector."""
    return computed_answers(model, tmp_path_factory.mktemp("alone"))
