"""The catalog of DataProto rows: checked handles, the catalog itself, and a client of it."""

__all__: list[str] = []
