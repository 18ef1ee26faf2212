"""Tensors of the store as files of the format safetensors, and back."""

from __future__ import annotations

import importlib
import os
from typing import Final, TypeAlias

from mooncake._hints import torch
from mooncake._runtime import _native
from mooncake.store.batch import Key
from mooncake.store.codes import FILE_NOT_FOUND, INVALID_PARAMS, OK
from mooncake.store.tensors.base import TensorBase

__all__ = ["SafetensorsCalls"]

FileName: TypeAlias = str | os.PathLike[str]

# Exceptions of safetensors for files that cannot be read or written, and for tensors that it does
# not support; beside `SafetensorError`.
_FAILURES: Final = (ImportError, OSError, ValueError, KeyError)


class SafetensorsCalls(TensorBase):
    """Files of the format safetensors, which other programs read and write."""

    __slots__ = ()

    def save_tensor_to_safetensor(self, key: Key, file_name: FileName | None = None) -> int:
        """Write a tensor of the store into a file, under the name of its key.

        Args:
            key: Key of the tensor.
            file_name: Path of the file; None is the key.

        Returns:
            0, or a negative number: -1100 if there is no such tensor, -600 if the file cannot be
            written, or safetensors has no such dtype or is not installed.

        Raises:
            ImportError: torch is not installed.
        """
        tensor = self._get_tensors([key])[0]
        if self._native is None:
            return INVALID_PARAMS
        if tensor is None:
            return _native.failure(FILE_NOT_FOUND, "there is no tensor to save", key=key).code
        try:
            _save(tensor, _text(key), file_name)
        except _FAILURES as error:
            return self._refuse(key, f"the tensor was not saved: {_reason(error)}")
        return OK

    def load_tensor_from_safetensor(
        self, key: Key | None = None, file_name: FileName | None = None
    ) -> torch.Tensor | None:
        """Read a tensor from a file and store it. An existing object is kept.

        Args:
            key: Name of the tensor in the file, and key under which it is stored. A file with one
                tensor may have another name for it. None reads the first tensor of the file, and
                stores it under the path of the file.
            file_name: Path of the file.

        Returns:
            The tensor; None if it was not read or not stored.

        Raises:
            TypeError: There is no `file_name`.
        """
        if file_name is None:
            raise TypeError("load_tensor_from_safetensor() needs file_name")
        target = os.fspath(file_name) if key is None else key
        try:
            tensor = _load(None if key is None else _text(key), file_name)
        except _FAILURES as error:
            self._refuse(target, f"the tensor was not loaded: {_reason(error)}")
            return None
        return tensor if self._put_tensors([target], [tensor])[0] == OK else None


def _save(tensor: torch.Tensor, name: str, file_name: FileName | None) -> None:
    safetensors = importlib.import_module("safetensors")
    files = importlib.import_module("safetensors.torch")
    try:
        files.save_file({name: tensor}, name if file_name is None else os.fspath(file_name))
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from error


def _load(name: str | None, file_name: FileName) -> torch.Tensor:
    safetensors = importlib.import_module("safetensors")
    try:
        with safetensors.safe_open(os.fspath(file_name), framework="pt") as file:
            names = list(file.keys())
            if name not in names:
                if not names or (name is not None and len(names) > 1):
                    raise ValueError(f"the file has no tensor of that name names={names[:10]}")
                name = names[0]
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor
    except safetensors.SafetensorError as error:
        raise ValueError(str(error)) from error


def _text(key: Key) -> str:
    return key if isinstance(key, str) else os.fsdecode(key)


def _reason(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "safetensors is not installed: pip install safetensors torch"
    if isinstance(error, KeyError):
        return f"safetensors has no dtype {error}"
    return str(error)
