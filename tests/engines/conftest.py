"""Fixtures of the tests with real engines, which `make test-engines` runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prompts import Answers, computed_answers
from results import Results
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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that keeps results."""
    parser.addoption("--record", action="store_true", help="write results.json")


@pytest.fixture(scope="session")
def results(pytestconfig: pytest.Config) -> Iterator[Results]:
    """What the tests ran, for the page about versions."""
    results = Results()
    yield results
    if pytestconfig.getoption("--record"):
        results.save()
