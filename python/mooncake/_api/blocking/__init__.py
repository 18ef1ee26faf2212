"""The calls of `Store`, generated from those of `AsyncStore`."""

__all__: list[str] = []
