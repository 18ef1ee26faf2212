"""Columns of Python objects as arrays: each codec turns the rows of a column into few payloads.

In reading order: `leaf` (the notions), `scalars`, `blobs`, `ragged` and `media` (one codec family
each), `table` (all of them by name), `tree` and `tensor_dict` (columns that consist of columns),
`decisions` (the codec that upstream takes for a part of a tree), `inference` (the codec of a column
without a schema), and `column` (encoding and decoding).
"""

from __future__ import annotations

__all__: list[str] = []
