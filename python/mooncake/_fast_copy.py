"""Upstream's module of a copy without the GIL: many arrays, one after the other, into memory."""

from __future__ import annotations

from mooncake._runtime import _native

__all__ = ["concat_arrays_into"]

concat_arrays_into = _native.concat_arrays_into
