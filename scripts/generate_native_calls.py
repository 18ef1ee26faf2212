"""Write the calls of event loops from the blocking calls of the native store, or check them.

The source is the class `Store` of ``python/mooncake/_native.pyi``, from the line `SHARED` to its
end. Each of these methods is written again, with the same arguments, as a method of `Pending` in
the same file, which returns the number of the call, and as a coroutine in
``python/mooncake/_api/async_calls.py``. ``ruff`` formats the result.
"""

from __future__ import annotations

import argparse
import ast
import copy
import subprocess
import sys
import sysconfig
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "python/mooncake"
STUB = PACKAGE / "_native.pyi"
COROUTINES = PACKAGE / "_api/async_calls.py"

SHARED = "    # Calls of `Pending` and of event loops, too: `make generate` writes them again."
GENERATED = (
    "    # Generated from `Store` by scripts/generate_native_calls.py, to the end of the class"
)

HEADER = '''"""The calls of a native store as coroutines."""

# Generated from mooncake/_native.pyi by scripts/generate_native_calls.py; do not edit.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from mooncake._hints import Readable
from mooncake._runtime import _native
from mooncake.errors import MooncakeError

__all__ = ["AsyncCalls"]

_T = TypeVar("_T")
'''
CLASS = '''

class AsyncCalls(ABC):
    """Calls that take and return what those of the native store do."""

    __slots__ = ()

    @abstractmethod
    async def outcome_of(self, begin: Callable[[_native.Pending], _native.Begun[_T]]) -> _T:
        """Begin a call in the running loop and wait for its outcome."""

'''
# The defaults that the stub does not name, by their type.
EMPTY = {"bytes": ast.Constant(b""), "Sequence[str]": ast.Tuple([], ast.Load())}
HELD = " The memory is held until it is taken."


class _Names(ast.NodeTransformer):
    """Names of the stub as another place has them."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Return the expression for a name."""
        if node.id not in self.names:
            return node
        return ast.parse(self.names[node.id], mode="eval").body


def renamed(node: ast.AST, names: dict[str, str]) -> ast.AST:
    """Return a copy of code with other names."""
    changed: ast.AST = _Names(names).visit(copy.deepcopy(node))
    return changed


def shared_calls(stub: str) -> list[ast.FunctionDef]:
    """Return the methods of `Store` that come after the marker."""
    after = stub[: stub.index(SHARED)].count("\n") + 1
    tree = ast.parse(stub)
    (store,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Store")
    return [n for n in store.body if isinstance(n, ast.FunctionDef) and n.lineno > after]


def method(call: ast.FunctionDef, *, docstring: str, body: str = "", is_async: bool = False) -> str:
    """Return the text of a method."""
    assert call.returns is not None, call.name
    text = f"def {call.name}({ast.unparse(call.args)}) -> {ast.unparse(call.returns)}:\n"
    lines = [("async " if is_async else "") + text, f'    """{docstring}"""\n']
    lines += [f"    {line}\n" for line in body.splitlines()]
    return "".join(f"    {line}" for line in "".join(lines).splitlines(keepends=True)) + "\n"


def pending_method(call: ast.FunctionDef) -> str:
    """Return a call as a method of `Pending`."""
    begun = copy.deepcopy(call)
    assert begun.returns is not None
    # `list` is a method of the class.
    returned = ast.unparse(renamed(begun.returns, {"list": "_List"}))
    begun.returns = ast.parse(f"Begun[{returned}]", mode="eval").body
    types = {ast.unparse(a.annotation) for a in call.args.args if a.annotation is not None}
    holds = any(name in text for text in types for name in ("_Readable", "_Values"))
    return method(begun, docstring=f"Begin what `Store.{call.name}` does.{HELD if holds else ''}")


def coroutine(call: ast.FunctionDef, names: dict[str, str]) -> str:
    """Return a call as a coroutine."""
    named = renamed(call, names)
    assert isinstance(named, ast.FunctionDef)
    for argument, default in zip(call.args.kwonlyargs, call.args.kw_defaults, strict=True):
        if isinstance(default, ast.Constant) and default.value is ...:
            at = call.args.kwonlyargs.index(argument)
            assert argument.annotation is not None
            named.args.kw_defaults[at] = EMPTY[ast.unparse(argument.annotation)]
    passed = [argument.arg for argument in call.args.args[1:]]
    passed += [f"{argument.arg}={argument.arg}" for argument in call.args.kwonlyargs]
    summary = ast.get_docstring(call)
    assert summary is not None, call.name
    return method(
        named,
        docstring=summary.split("\n\n")[0],
        body=f"return await self.outcome_of(lambda calls: calls.{call.name}({', '.join(passed)}))",
        is_async=True,
    )


def aliases(stub: str, used: str) -> tuple[str, dict[str, str]]:
    """Return the aliases of the stub that code uses, and what its other names are elsewhere."""
    tree = ast.parse(stub)
    classes = {n.name: f"_native.{n.name}" for n in tree.body if isinstance(n, ast.ClassDef)}
    names = {**classes, "_Readable": "Readable"}
    wanted = {node.id for node in ast.walk(ast.parse(used)) if isinstance(node, ast.Name)}
    found = []
    for node in reversed(tree.body):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id in wanted
            and node.value is not None
        ):
            wanted |= {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}
            value = ast.unparse(renamed(node.value, names))
            found.append(f'{node.target.id}: TypeAlias = "{value}"\n')
    return "".join(reversed(found)), names


def formatted(source: str, path: Path) -> str:
    """Return source code in the format of the project."""
    ruff = Path(sysconfig.get_path("scripts")) / "ruff"
    command = [str(ruff), "format", "--quiet", "--stdin-filename", str(path), "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    return done.stdout


def with_pending(stub: str, calls: list[ast.FunctionDef]) -> str:
    """Return the stub with these calls as methods of `Pending`."""
    before, _, after = stub.partition(GENERATED)
    following = after[after.index("\n@final\n") :]
    methods = "".join(map(pending_method, calls))
    return formatted(f"{before}{GENERATED}\n\n{methods}{following}", STUB)


def generated(stub: str) -> dict[Path, str]:
    """Return the content of every file that is generated from the stub, itself included."""
    calls = shared_calls(stub)
    used, names = aliases(stub, "\n".join(map(ast.unparse, calls)))
    coroutines = "".join(coroutine(call, names) for call in calls)
    module = formatted(f"{HEADER}{used}{CLASS}{coroutines}", COROUTINES)
    return {STUB: with_pending(stub, calls), COROUTINES: module}


def main() -> int:
    """Write the files; with ``--check`` say which ones are stale."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only fail if a file is stale")
    is_check = parser.parse_args().check
    wanted = generated(STUB.read_text(encoding="utf-8"))
    stale = [
        path
        for path, text in wanted.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        if is_check:
            print(f"stale: {path.name}; run make generate", file=sys.stderr)
        else:
            path.write_text(wanted[path], encoding="utf-8")
    return 1 if is_check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
