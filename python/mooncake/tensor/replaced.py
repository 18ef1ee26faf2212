"""Tensors in shards that an object with the key of the tensor replaces, or gives way to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mooncake._runtime import PutOptions, _native
from mooncake.errors import MooncakeError
from mooncake.tensor.calls import Operation
from mooncake.tensor.format import GUIDE_SUFFIXES
from mooncake.tensor.forms import Form, forms_of
from mooncake.tensor.inventory import stored_keys
from mooncake.tensor.write import remove_objects

__all__ = ["NO_SHARDS", "may_replace", "remove_shards", "split_forms"]

NO_SHARDS: Final = _native.AbsentSuffixes(GUIDE_SUFFIXES)
"""The condition of a put that no tensor is stored in shards under the key, which costs no call.

An `AlreadyExistsError` is the outcome of the items for which objects have the names of shards or
manifests. Anybody may give such names to other objects, so that `split_forms` reads them.
"""


def may_replace(options: PutOptions | None, *, overwrite: bool) -> bool:
    """Return whether a put may replace a tensor in shards: not one that names a version."""
    return overwrite and (options is None or options.if_versions is None)


def split_forms(keys: Sequence[bytes]) -> Operation[list[Form | MooncakeError | None]]:
    """Return for each key in which form a tensor is stored in shards under it; None for none.

    Args:
        keys: The keys.

    Returns:
        For each key the form, None, or why that is not known.
    """
    forms = yield from forms_of([(key, ()) for key in keys])
    return [form if isinstance(form, MooncakeError) or form.is_split else None for form in forms]


def remove_shards(form: Form) -> Operation[None]:
    """Remove the shards and manifests of a tensor, but no object with its own key.

    Raises:
        MooncakeError: An object cannot be removed. What tells of the tensor stays, so that the
            removal can be repeated.
    """
    names = yield from stored_keys(form)
    yield from remove_objects(form.key, [name for name in names if name != form.key], force=True)
