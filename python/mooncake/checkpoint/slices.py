"""`safe_open`: tensors of a checkpoint by name and slice, without the rest."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Literal, Self

from mooncake._api.async_store import AsyncStore
from mooncake._api.keywords import suggesting
from mooncake._api.store import Store
from mooncake.checkpoint.loading import new_tensor
from mooncake.checkpoint.manifest import Tensor, read_manifest
from mooncake.checkpoint.names import Keys, native_of
from mooncake.checkpoint.safetensors import LAYOUT, code_of
from mooncake.checkpoint.transfer import Reader

__all__ = ["SafeOpen", "TensorSlice", "safe_open"]

FRAMEWORKS = ("pt", "pytorch", "np", "numpy")


@suggesting
def safe_open(
    store: Store | AsyncStore, prefix: str, framework: str = "pt", device: Any = "cpu"
) -> SafeOpen:
    """Open a checkpoint, to read tensors of it by name and slice as safetensors does from files.

    Args:
        store: The store.
        prefix: Name of the checkpoint.
        framework: ``"pt"`` for tensors of torch, ``"numpy"`` for arrays.
        device: Device of tensors.

    Raises:
        NotFoundError: There is no such checkpoint.
        ValueError: The framework is unknown.

    Example:
        >>> with checkpoint.safe_open(store, "weights/7") as file:
        ...     rows = file.get_slice("embed.weight")[:100]
    """
    return SafeOpen(store, prefix, framework, device)


class SafeOpen:
    """An open checkpoint. All reads are from the save that was there when it was opened."""

    def __init__(self, store: Store | AsyncStore, prefix: str, framework: str, device: Any) -> None:
        """Prepare the value that `safe_open` returns."""
        if framework not in FRAMEWORKS:
            raise ValueError(f'a framework is "pt" or "numpy", not {framework!r}')
        self._native, self._keys = native_of(store), Keys(prefix)
        self._manifest = read_manifest(self._native, self._keys)
        self._tensors = {each.name: each for each in self._manifest.tensors}
        self._is_array = framework in ("np", "numpy")
        self._device = device

    def keys(self) -> list[str]:
        """Return the names of the tensors: their paths in the state dict, with dots."""
        return sorted(self._tensors)

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors in the order in which they were saved."""
        return [*self._tensors]

    def metadata(self) -> dict[str, str] | None:
        """Return the text that was saved beside the tensors; None if there is none."""
        texts = self._manifest.metadata.items()
        return {name: text for name, text in texts if name != LAYOUT} or None

    def get_tensor(self, name: str) -> Any:
        """Read a tensor.

        Raises:
            NotFoundError: The checkpoint has no such tensor, or a part is missing.
        """
        tensor = self._manifest.tensor(name) if name not in self._tensors else self._tensors[name]
        return self._read(tensor, ((0,) * len(tensor.shape), tensor.shape))

    def get_slice(self, name: str) -> TensorSlice:
        """Return a tensor whose parts are read by index: ``get_slice("w")[2:5, 0]``.

        Raises:
            NotFoundError: The checkpoint has no such tensor.
        """
        return TensorSlice(self, self._manifest.tensor(name))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> Literal[False]:
        return False

    def _read(self, tensor: Tensor, box: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
        request, value = new_tensor(tensor, box, as_array=self._is_array)
        if request is not None:
            Reader(self._native, self._keys).read([request])
        return value if self._is_array or self._device == "cpu" else value.to(self._device)


class TensorSlice:
    """A tensor of which an index reads a part."""

    def __init__(self, file: SafeOpen, tensor: Tensor) -> None:
        """Prepare the value that `SafeOpen.get_slice` returns."""
        self._file = file
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return [*self._tensor.shape]

    def get_dtype(self) -> str:
        """Return the type of the elements as safetensors spells it."""
        return code_of(self._tensor.dtype)

    def __getitem__(self, index: Any) -> Any:
        """Read the part that integers, slices and an ellipsis select.

        Raises:
            IndexError: There are too many indices, or one is out of range.
            TypeError: An index is of another kind.
        """
        start: list[int] = []
        lengths: list[int] = []
        left: list[Any] = []
        for item, length in zip(self._whole(index), self._tensor.shape, strict=True):
            if isinstance(item, slice):
                found = range(*item.indices(length))
                if found and found.step < 0:
                    raise ValueError("a slice has a positive step")
                start.append(found[0] if found else 0)
                lengths.append(found[-1] - found[0] + 1 if found else 0)
                left.append(slice(None, None, found.step))
            else:
                at = range(length)[item]
                start.append(at)
                lengths.append(1)
                left.append(0)
        value = self._file._read(self._tensor, (tuple(start), tuple(lengths)))
        return value if not left else value[tuple(left)]

    def _whole(self, index: Any) -> list[Any]:
        """Return one index for each dimension."""
        items = [*index] if isinstance(index, tuple) else [index]
        for item in items:
            if item is not Ellipsis and not isinstance(item, slice | int):
                kind = type(item).__name__
                raise TypeError(f"an index is an integer, a slice or an ellipsis, not {kind}")
        missing = len(self._tensor.shape) - sum(item is not Ellipsis for item in items)
        if missing < 0 or items.count(Ellipsis) > 1:
            text = f"too many indices for the {len(self._tensor.shape)} dimensions"
            raise IndexError(f"{text} of {self._tensor.name!r}")
        at = items.index(Ellipsis) if Ellipsis in items else len(items)
        return [*items[:at], *[slice(None)] * missing, *items[at + 1 :]]
