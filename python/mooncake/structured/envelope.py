"""Batches as callers pass them: objects, dictionaries of sections, and flat dictionaries."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from mooncake.structured.columns.column import object_array
from mooncake.structured.columns.leaf import FieldSchema
from mooncake.structured.columns.ragged import is_tensor
from mooncake.structured.destinations import TensorObjectBuffer
from mooncake.structured.manifest import checked_name
from mooncake.structured.references import Section

__all__ = [
    "Envelope",
    "FieldSchemas",
    "NoRowsError",
    "build_result",
    "column_values",
    "envelope_of",
    "flat_envelope",
    "flat_result",
    "schema_of",
    "schema_section",
]

_SECTIONS: Final = ("batch", "non_tensor_batch", "meta_info")

FieldSchemas = Mapping[str, FieldSchema]


class NoRowsError(TypeError, ValueError):
    """A field of a batch has no rows; a TypeError as of ``len``, which upstream raises."""


@dataclass(slots=True)
class Envelope:
    """A batch: two sections of fields with one row count, and metadata.

    Attributes:
        batch: Fields that are arrays or tensors.
        non_tensor_batch: Fields that are arrays, or columns of Python objects.
        meta_info: Anything else.
    """

    batch: dict[str, Any] = field(default_factory=dict)
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def check(self, schemas: FieldSchemas) -> int:
        """Check sections, numbers of rows and names, in the order in which upstream does.

        Args:
            schemas: How fields are stored.

        Returns:
            The number of rows.

        Raises:
            TypeError: A field needs its number of rows.
            ValueError: The fields contradict each other or their schemas, or a name is not valid.
        """
        self._check_sections(schemas)
        rows = self.row_count
        both = sorted(self.batch.keys() & self.non_tensor_batch.keys(), key=str)
        if both:
            raise ValueError(f"DataProto batch and non_tensor_batch fields overlap: {both}")
        for section, fields in self.sections():
            for name in fields:
                # Names may be empty or numbers, as upstream's: those of the members are neither.
                checked_name("buffer name", f"{section}.{name}")
        return rows

    def _check_sections(self, schemas: FieldSchemas) -> None:
        """Check that each field which a schema is for is in the section that the schema declares.

        Raises:
            ValueError: A field is elsewhere only. One that is nowhere is fine.
        """
        for name, schema in schemas.items():
            declared = schema_section(name, schema)
            having = [section for section in _SECTIONS if name in getattr(self, section)]
            if declared is not None and having and declared not in having:
                raise ValueError(
                    f"FieldSchema for {name!r} declares section {declared!r}, but data contains it "
                    f"in {', '.join(map(repr, having))}"
                )

    def sections(self) -> tuple[tuple[Section, dict[str, Any]], ...]:
        """Return the sections with fields, and their names."""
        return ("batch", self.batch), ("non_tensor_batch", self.non_tensor_batch)

    @property
    def row_count(self) -> int:
        """Number of rows of each field; 0 if there are no fields.

        Raises:
            ValueError: The fields differ in their number of rows, or one has no rows.
        """
        counts = {
            _row_count(name, value)
            for _, section in self.sections()
            for name, value in section.items()
        }
        if len(counts) > 1:
            raise ValueError(
                f"DataProto fields have inconsistent batch sizes: {sorted(counts)}{self._hint()}"
            )
        return counts.pop() if counts else 0

    def _hint(self) -> str:
        """Return what may be wrong if a field of the batch is a dictionary."""
        nested = [name for name, value in self.batch.items() if isinstance(value, Mapping)]
        if not nested:
            return ""
        return (
            f"; {nested[0]!r} is a dictionary, which is no field: a dictionary is taken for the "
            f"sections of a batch only if it has no other keys than {', '.join(_SECTIONS)}"
        )


def envelope_of(data: Any) -> Envelope:
    """Return the sections of a batch.

    Args:
        data: An object or a dictionary with `batch`, `non_tensor_batch` and `meta_info`, of which
            each may be missing or None; or a dictionary of fields. A dictionary with any other key,
            or with anything but mappings under these, is one of fields.

    Raises:
        TypeError: The argument is none of these.
    """
    if isinstance(data, Mapping):
        if not _has_sections(data):
            return Envelope(batch=dict(data))
        return Envelope(*(_fields(section, data.get(section)) for section in _SECTIONS))
    if data is None or not any(hasattr(data, section) for section in _SECTIONS):
        raise TypeError(
            "a DataProto is an object or a dictionary with batch, non_tensor_batch and meta_info, "
            f"not {type(data).__name__}"
        )
    return Envelope(*(_fields(section, getattr(data, section, None)) for section in _SECTIONS))


def flat_envelope(data: Any, schemas: FieldSchemas) -> Envelope:
    """Return the sections of a dictionary of columns and values.

    Arrays and tensors with the row count are fields of the batch; lists of that length are columns;
    the rest is metadata. A schema may name the section of a field in its metadata; lists without
    such a schema are then metadata.

    Raises:
        TypeError: The argument is no dictionary.
        ValueError: The arrays differ in their number of rows, or an array or a tensor is in a value
            that is not a field.
    """
    if not isinstance(data, Mapping):
        raise TypeError("flat dict payload must be a mapping")
    sections = {name: schema_section(name, schemas[name]) for name in data if name in schemas}
    declared = Envelope()
    for name, section in sections.items():
        if section in ("batch", "non_tensor_batch"):
            declared.batch[name] = data[name]
    rows = declared.row_count
    is_declared = bool(declared.batch)
    if not is_declared:
        rows = _flat_row_count({name: data[name] for name in data if sections.get(name) is None})
    result = Envelope()
    for name, value in data.items():
        section = sections.get(name)
        if section is None:
            is_aligned = _length(value) == rows and rows > 0
            if is_aligned and _is_dense(value):
                section = "batch"
            elif is_aligned and not is_declared and _is_column(value):
                section = "non_tensor_batch"
            else:
                section = "meta_info"
                _check_metadata(name, value, rows)
        if section == "non_tensor_batch" and isinstance(value, list | tuple):
            value = object_array(value)
        getattr(result, section)[name] = value
    return result


def _check_metadata(name: str, value: Any, rows: int) -> None:
    """Check that a value which is no field of a flat dictionary has no arrays or tensors in it.

    Metadata stays in the reference, so that these would never reach the store.

    Raises:
        ValueError: There is one.
    """
    left: list[tuple[str, Any]] = [(repr(name), value)]
    seen: set[int] = set()
    while left:
        at, each = left.pop()
        if isinstance(each, Mapping | list | tuple):
            if id(each) in seen:
                continue
            seen.add(id(each))
            pairs = each.items() if isinstance(each, Mapping) else enumerate(each)
            left += [(f"{at}[{key!r}]", item) for key, item in pairs]
        elif _is_dense(each) or (isinstance(each, np.ndarray) and each.ndim > 0):
            raise ValueError(
                f"flat dict field {name!r} has an array or a tensor at {at}, and is no column of "
                f"{rows} rows, so that it would not be stored: give it a key of its own with one "
                "item for each row, or declare it with FieldSchema(metadata={'section': ...})"
            )


def schema_section(name: str, schema: FieldSchema) -> str | None:
    """Return the section that a schema declares, or None.

    Raises:
        ValueError: There is no such section.
    """
    section = schema.metadata.get("section")
    if section is not None and section not in _SECTIONS:
        raise ValueError(
            f"FieldSchema for {name!r} metadata['section'] must be one of {sorted(_SECTIONS)}"
        )
    return section


def schema_of(schemas: FieldSchemas, name: str, section: str) -> FieldSchema | None:
    """Return the schema of a field, unless it is for another section."""
    schema = schemas.get(name)
    if schema is None or schema_section(name, schema) not in (None, section):
        return None
    options = {key: value for key, value in schema.metadata.items() if key != "section"}
    return FieldSchema(schema.codec, schema.nullable, options)


def build_result(result: Envelope, data_cls: Any) -> Any:
    """Return a batch in the caller's class, or as a dictionary of its sections.

    Raises:
        TypeError: The class cannot be constructed from the sections.
    """
    if data_cls is None:
        return {
            "batch": result.batch,
            "non_tensor_batch": result.non_tensor_batch,
            "meta_info": result.meta_info,
        }
    from_dict = getattr(data_cls, "from_dict", None)
    try:
        if callable(from_dict):
            return from_dict(result.batch, result.non_tensor_batch, meta_info=result.meta_info)
        return data_cls(
            batch=result.batch, non_tensor_batch=result.non_tensor_batch, meta_info=result.meta_info
        )
    except TypeError as error:
        name = repr(getattr(data_cls, "__name__", data_cls))
        raise TypeError(
            f"{name} cannot be constructed from batch, non_tensor_batch, and meta_info: {error}"
        ) from error


def flat_result(result: Envelope, columns: Container[str]) -> dict[str, Any]:
    """Return a batch as a dictionary of all fields and metadata.

    Args:
        result: The batch.
        columns: Names of the fields that are lists in the dictionary.

    Raises:
        ValueError: A name is in several sections.
    """
    flat: dict[str, Any] = {}
    twice: set[str] = set()
    lists = {
        name: list(each) if name in columns else each
        for name, each in result.non_tensor_batch.items()
    }
    for section in (result.meta_info, result.batch, lists):
        twice |= flat.keys() & section.keys()
        flat |= section
    if twice:
        raise ValueError(
            f"Duplicate keys found across DataProto sections: {sorted(twice, key=str)}"
        )
    return flat


def column_values(name: str, value: Any, schema: FieldSchema | None) -> list[Any] | None:
    """Return the rows of a column of Python objects; None for any other field.

    Args:
        name: Name of the field, for errors.
        value: The field.
        schema: Its schema, which may require that an array is stored as a column.

    Raises:
        ValueError: An array of objects has more than one dimension.
    """
    if isinstance(value, list | tuple):
        return list(value)
    if not isinstance(value, np.ndarray):
        return None
    if not value.dtype.hasobject:
        is_column = schema is not None and schema.codec not in ("auto", "ndarray")
        return list(value) if is_column and value.ndim > 0 else None
    if value.ndim != 1:
        raise ValueError(
            f"unsupported structured non-tensor field {name}: an array of objects has one "
            f"dimension, not {value.ndim}"
        )
    return list(value)


def _has_sections(data: Mapping[Any, Any]) -> bool:
    """Return whether a dictionary has the sections of a batch, rather than fields."""
    return all(key in _SECTIONS for key in data) and all(
        value is None or isinstance(value, Mapping) or callable(getattr(value, "items", None))
        for value in data.values()
    )


def _fields(section: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    items = getattr(value, "items", None)
    if items is None:
        raise TypeError(f"DataProto {section} must be a mapping, not {type(value).__name__}")
    return dict(items())


def _flat_row_count(data: Mapping[str, Any]) -> int:
    dense = {len(value) for value in data.values() if _is_dense(value)}
    if len(dense) > 1:
        raise ValueError(f"flat dict dense fields have ambiguous batch sizes: {sorted(dense)}")
    if dense:
        return dense.pop()
    counts = {len(value) for value in data.values() if _is_column(value)}
    if len(counts) > 1:
        raise ValueError(
            f"flat dict fields have ambiguous batch sizes: {sorted(counts)}; declare them with "
            "FieldSchema(metadata={'section': ...})"
        )
    return counts.pop() if counts else 0


def _is_dense(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and not value.dtype.hasobject
    return bool((is_tensor(value) and value.dim() > 0) or getattr(value, "is_nested", False))


def _is_column(value: Any) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim == 1)


def _length(value: Any) -> int:
    try:
        return len(value)
    except TypeError:
        return -1


def _row_count(name: str, value: Any) -> int:
    if isinstance(value, TensorObjectBuffer) and value.batch_size is None:
        raise TypeError(f"DataProto field {name!r}: tensor_object_buffer needs its batch_size")
    count = int(value.size(0)) if getattr(value, "is_nested", False) else _length(value)
    if count < 0:
        raise NoRowsError(
            f"DataProto field {name!r} has no rows: a {type(value).__name__} without dimensions "
            "belongs into meta_info"
        )
    return count
