"""The calls of `AsyncStore`; ``scripts/generate_blocking_api.py`` makes those of `Store` of them.

Only what is common to both is here. A statement that waits has ``await``, ``async with`` or
``async for``; the generator drops these words and the prefix ``Async`` of names.
"""

__all__: list[str] = []
