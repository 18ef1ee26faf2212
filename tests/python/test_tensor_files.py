"""Upstream's calls for files of the format safetensors."""

from __future__ import annotations

import sys

import pytest

import mooncake

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
files = pytest.importorskip(
    "safetensors.torch", reason="needs safetensors: pip install safetensors"
)

INVALID, NO_FILE = -600, -1100


def matrix() -> torch.Tensor:
    return torch.arange(24, dtype=torch.float32).reshape(4, 6)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.bool]
)
def test_saved_files_are_read_by_safetensors(compat_store, tmp_path, dtype):
    tensor = matrix().to(dtype).t()
    assert compat_store.put_tensor("k", tensor) == 0
    assert compat_store.save_tensor_to_safetensor("k", tmp_path / "file") == 0
    found = files.load_file(tmp_path / "file")
    assert list(found) == ["k"]
    assert found["k"].dtype == dtype
    assert torch.equal(found["k"].float(), tensor.float())


def test_the_default_file_is_the_key(compat_store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert compat_store.put_tensor(b"k", matrix()) == 0
    assert compat_store.save_tensor_to_safetensor(b"k") == 0
    assert torch.equal(files.load_file("k")["k"], matrix())


def test_failed_saves_have_codes_and_reasons(compat_store, tmp_path):
    assert compat_store.save_tensor_to_safetensor("none", str(tmp_path / "file")) == NO_FILE
    assert compat_store.put_tensor("k", matrix()) == 0
    assert compat_store.save_tensor_to_safetensor("k", str(tmp_path / "no" / "file")) == INVALID
    assert "not saved" in str(mooncake.last_error())
    assert compat_store.put_tensor("c", torch.ones(2, dtype=torch.complex128)) == 0
    assert compat_store.save_tensor_to_safetensor("c", str(tmp_path / "file")) == INVALID
    assert "no dtype torch.complex128" in str(mooncake.last_error())
    assert list(tmp_path.iterdir()) == []


def test_loaded_tensors_are_stored(compat_store, tmp_path):
    file = str(tmp_path / "file")
    files.save_file({"a": matrix(), "b": matrix() + 1}, file)
    assert torch.equal(compat_store.load_tensor_from_safetensor("b", file), matrix() + 1)
    assert torch.equal(compat_store.get_tensor("b"), matrix() + 1)
    assert torch.equal(compat_store.load_tensor_from_safetensor(file_name=file), matrix())
    assert torch.equal(compat_store.get_tensor(file), matrix())


def test_a_file_of_one_tensor_needs_no_name(compat_store, tmp_path):
    file = tmp_path / "file"
    files.save_file({"a": matrix()}, file)
    assert torch.equal(compat_store.load_tensor_from_safetensor("other", file), matrix())
    assert torch.equal(compat_store.get_tensor("other"), matrix())


def test_failed_loads_are_none_and_store_nothing(compat_store, tmp_path):
    file = tmp_path / "file"
    files.save_file({"a": matrix(), "b": matrix()}, file)
    assert compat_store.load_tensor_from_safetensor("c", file) is None
    assert "no tensor of that name names=['a', 'b']" in str(mooncake.last_error())
    assert compat_store.load_tensor_from_safetensor("c", tmp_path / "none") is None
    file.write_bytes(b"no header of safetensors at all")
    assert compat_store.load_tensor_from_safetensor("c", file) is None
    files.save_file({}, file)
    assert compat_store.load_tensor_from_safetensor(None, file) is None
    assert compat_store.is_exist("c") == 0
    with pytest.raises(TypeError, match="file_name"):
        compat_store.load_tensor_from_safetensor("c")


def test_missing_safetensors_is_named(compat_store, tmp_path, monkeypatch):
    file = tmp_path / "file"
    files.save_file({"a": matrix()}, file)
    assert compat_store.put_tensor("k", matrix()) == 0
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert compat_store.save_tensor_to_safetensor("k", file) == INVALID
    assert "pip install safetensors" in str(mooncake.last_error())
    assert compat_store.load_tensor_from_safetensor("a", file) is None
    assert "pip install safetensors" in str(mooncake.last_error())
