"""The annotations of public classes and functions can be read with `typing.get_type_hints`."""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import typing
from collections.abc import Iterator

import pytest

import mooncake

OPTIONAL = {"ml_dtypes", "msgpack", "msgspec", "numpy", "safetensors", "torch", "vllm", "zmq"}


def public_modules() -> list[str]:
    # Found by path: an import of all packages would need all optional ones.
    found = ["mooncake"]
    pending = [(list(mooncake.__path__), "mooncake.")]
    while pending:
        paths, prefix = pending.pop()
        for module in pkgutil.iter_modules(paths):
            if not module.name.startswith("_"):
                found.append(prefix + module.name)
                if module.ispkg:
                    below = [f"{path}/{module.name}" for path in paths]
                    pending.append((below, f"{prefix}{module.name}."))
    return sorted(found)


def members(owner: type) -> Iterator[tuple[str, object]]:
    """The methods and properties of a class, also those that it inherits from the package."""
    for base in owner.__mro__:
        if not base.__module__.startswith("mooncake"):
            continue
        for name, value in vars(base).items():
            if name.startswith("_") and name != "__init__":
                continue
            if isinstance(value, staticmethod | classmethod):
                value = value.__func__
            elif isinstance(value, property):
                value = value.fget
            if inspect.isfunction(value):
                yield f"{base.__qualname__}.{name}", value


def public_objects(module: object) -> Iterator[tuple[str, object]]:
    for name in getattr(module, "__all__", None) or list(vars(module)):
        value = None if name.startswith("_") else getattr(module, name)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        if not value.__module__.startswith("mooncake"):
            continue
        yield name, value
        if inspect.isclass(value):
            yield from members(value)


@pytest.mark.parametrize("name", public_modules())
def test_type_hints_of_public_names_can_be_read(name):
    failures = []
    try:
        for label, value in public_objects(importlib.import_module(name)):
            try:
                typing.get_type_hints(value)
            except (AttributeError, NameError, TypeError) as error:
                failures.append(f"{label}: {error}")
    except ImportError as error:
        text = f"{error} {error.__cause__}"
        absent = {package for package in OPTIONAL if package in text and not installed(package)}
        if not absent:
            raise
        pytest.skip(f"needs {', '.join(sorted(absent))}")
    assert not failures


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def test_all_of_the_package_is_walked():
    names = public_modules()
    assert {"mooncake.store", "mooncake.reshard.weight.planner", "mooncake.engine"} <= set(names)
    store = importlib.import_module("mooncake.store")
    found = dict(public_objects(store))
    assert len(found) > 100
    assert typing.get_type_hints(found["MooncakeDistributedStore"].put)
