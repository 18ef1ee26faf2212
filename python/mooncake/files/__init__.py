"""Objects of a pool as files: the protocol ``mooncake`` of fsspec, for the tools that read URLs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mooncake.files.filesystem import MooncakeFileSystem

__all__ = ["MooncakeFileSystem"]


def __getattr__(name: str) -> Any:
    """Import the file system on first use: it needs fsspec."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from mooncake.files.filesystem import MooncakeFileSystem
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "fsspec":
            raise
        text = "mooncake.files needs fsspec; pip install 'mooncake-transfer-engine[files]'"
        raise ModuleNotFoundError(text, name=error.name) from error
    return MooncakeFileSystem


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
