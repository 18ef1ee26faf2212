"""The methods of `Store` are generated from those of `AsyncStore`, and up to date."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/generate_blocking_api.py"
spec = importlib.util.spec_from_file_location("generate_blocking_api", SCRIPT)
assert spec is not None
assert spec.loader is not None
generator = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generator)


def test_generated_files_are_up_to_date() -> None:
    wanted = generator.generated()
    present = {path: path.read_text(encoding="utf-8") for path in generator.TARGET.glob("*.py")}
    assert present == wanted, "run make generate"


@pytest.mark.parametrize(
    ("source", "blocking"),
    [
        ("x = await f()\n", "x = f()\n"),
        ("async def f(a: AsyncNative) -> None: ...\n", "def f(a: Native) -> None: ...\n"),
        ("async with a, b:\n    pass\n", "with a, b:\n    pass\n"),
        ("async for a in b:\n    pass\n", "for a in b:\n    pass\n"),
        ("def f(q: Callable[[], Awaitable[I]]): ...\n", "def f(q: Callable[[], I]): ...\n"),
        ('s = f"{await g()}"\n', 's = f"{g()}"\n'),
        ("async def __aenter__(self): ...\n", "def __enter__(self): ...\n"),
        (
            '"""``async with store.lease()``\n>>> await x\n"""\n',
            '"""``with store.lease()``\n>>> x\n"""\n',
        ),
        ("asynchronous = awaited\n", "asynchronous = awaited\n"),
    ],
)
def test_words_of_coroutines_are_dropped(source: str, blocking: str) -> None:
    assert generator.blocking_source(source) == blocking
