"""Puts of bytes, which replace tensors in shards or give way to them, as coroutines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from mooncake._api.native_calls import AsyncNative
from mooncake._api.types import Key
from mooncake._api.values import encoded, options_for
from mooncake._hints import Readable
from mooncake._runtime import PutOptions
from mooncake.errors import AlreadyExistsError, MooncakeError
from mooncake.tensor.calls import run_async
from mooncake.tensor.forms import Form
from mooncake.tensor.replaced import NO_SHARDS, may_replace, remove_shards, split_forms

__all__ = ["put_bytes", "put_refused"]


async def put_bytes(
    native: Callable[[], AsyncNative],
    keys: Sequence[Key],
    values: Sequence[Readable | Sequence[Readable]],
    *,
    options: PutOptions | None = None,
    is_upsert: bool = False,
) -> list[bool | MooncakeError]:
    """Put values; a tensor in shards under one of the keys is replaced or kept as an object is.

    One call, and those that look at the shards and remove them if there are any.

    Args:
        native: Returns the native store for the next call.
        keys: Keys of the objects.
        values: Their bytes.
        options: Number of copies, pins, placement.
        is_upsert: Replace existing objects and tensors.

    Returns:
        For each key true if the value was stored, false if what exists was kept, or the failure.
    """
    outcomes = await native().put(
        keys, values, options=options, is_upsert=is_upsert, if_absent=NO_SHARDS
    )
    if not any(isinstance(each, AlreadyExistsError) for each in outcomes):
        return outcomes

    async def put_rows(rows: list[int]) -> Any:
        return await native().put(
            [keys[at] for at in rows],
            [values[at] for at in rows],
            options=options_for(options, rows),
            is_upsert=is_upsert,
        )

    await put_refused(
        native,
        keys,
        outcomes,
        put_rows,
        replaces=may_replace(options, overwrite=is_upsert),
    )
    return outcomes


async def put_refused(
    native: Callable[[], AsyncNative],
    keys: Sequence[Key],
    outcomes: list[Any],
    put_rows: Callable[[list[int]], Awaitable[Any]],
    *,
    replaces: bool,
) -> None:
    """Decide about puts that `NO_SHARDS` has refused, and change their outcomes.

    Args:
        native: Returns the native store for the next call.
        keys: Keys of the objects.
        outcomes: The outcomes of the puts, in which those refused are an `AlreadyExistsError`.
        put_rows: Puts items without the condition; returns their outcomes.
        replaces: Replace tensors in shards; otherwise they are kept.
    """
    refused = [at for at, each in enumerate(outcomes) if isinstance(each, AlreadyExistsError)]
    found = await run_async(native(), split_forms([encoded(keys[at]) for at in refused]))
    forms: dict[int, Form | None] = {}
    for at, form in zip(refused, found, strict=True):
        if isinstance(form, MooncakeError):
            outcomes[at] = form
        elif form is None or replaces:
            forms[at] = form
        else:
            outcomes[at] = False
    if not forms:
        return
    for (at, form), outcome in zip(forms.items(), await put_rows([*forms]), strict=True):
        outcomes[at] = outcome
        if form is not None and outcome and not isinstance(outcome, MooncakeError):
            try:
                await run_async(native(), remove_shards(form))
            except MooncakeError as failure:
                outcomes[at] = failure
