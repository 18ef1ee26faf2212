"""`mooncake checkpoint` moves safetensors files, and `safe_open` reads parts of a checkpoint."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open as open_file
from safetensors.torch import load_file, save_file

import mooncake
from mooncake import checkpoint
from mooncake._command.main import main
from mooncake.checkpoint import safetensors

MIB = 1 << 20


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[mooncake.Store]:
    with mooncake.Store(config=mooncake.StoreConfig(segment_bytes=32 * MIB)) as store:
        monkeypatch.setenv("MOONCAKE_MASTER", store.master_address)
        yield store


def tensors() -> dict[str, torch.Tensor]:
    return {
        "a.weight": torch.arange(12.0).reshape(3, 4),
        "a.bias": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(7),
    }


def run(*words: str) -> int:
    return main(["checkpoint", *words])


def failure(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a command that fails, and return what it says."""
    assert run(*words) != 0
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return said.err


def test_file_goes_to_the_pool_and_back(
    pool: mooncake.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, copy = tmp_path / "m.safetensors", tmp_path / "copy.safetensors"
    save_file(tensors(), source, metadata={"format": "pt"})
    assert run("save", str(source), "run/1", "--json") == 0
    saved = json.loads(capsys.readouterr().out)
    assert (saved["prefix"], saved["bytes"]) == ("run/1", 48 + 6 + 2 + 8)
    loaded = checkpoint.load(pool, "run/1")
    assert all(torch.equal(loaded[name], each) for name, each in tensors().items())
    assert run("load", "run/1", str(copy), "--progress") == 0
    assert "load run/1: 64 B in" in capsys.readouterr().err
    found = load_file(copy)
    assert found.keys() == tensors().keys()
    assert all(torch.equal(found[name], each) for name, each in tensors().items())
    with open_file(copy, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert sorted(os.listdir(tmp_path)) == ["copy.safetensors", "m.safetensors"]


def write_shards(folder: Path, **changes: str) -> None:
    places = {}
    for at in range(2):
        name = f"model-{at}.safetensors"
        shard = {f"layer.{at}.{each}": torch.full((50,), float(at)) for each in "ab"}
        save_file(shard, folder / name, metadata={"shard": str(at)})
        places |= dict.fromkeys(shard, name)
    index = {"metadata": {}, "weight_map": {**places, **changes}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_folder_with_an_index_goes_to_the_pool_and_back(
    pool: mooncake.Store, tmp_path: Path
) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    write_shards(source)
    (source / "config.json").write_text("{}")
    assert run("save", str(source), "llm") == 0
    assert run("load", "llm", str(copy)) == 0
    names = ["model-0.safetensors", "model-1.safetensors", "model.safetensors.index.json"]
    assert sorted(os.listdir(copy)) == names
    for name in names[:2]:
        assert load_file(copy / name).keys() == load_file(source / name).keys()
    index = json.loads((copy / names[2]).read_text())
    assert index["weight_map"]["layer.1.b"] == "model-1.safetensors"
    assert index["metadata"]["total_size"] == 800
    # Also as one file.
    assert run("load", "llm", str(tmp_path / "one.safetensors")) == 0
    assert len(load_file(tmp_path / "one.safetensors")) == 4


def test_list_verify_and_remove(
    pool: mooncake.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(tensors(), tmp_path / "m.safetensors")
    for name in ("run/1", "run/10"):
        assert run("save", str(tmp_path / "m.safetensors"), name, "--pin", "hard") == 0
    assert run("ls", "run") == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [
        "run/1",
        "run/10",
    ]
    assert run("ls", "run/1", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["nbytes"] == 64
    assert run("verify", "run/1") == 0
    (key,) = [key for key in pool.keys("run/1/") if key.endswith("a.weight")]
    pool.delete(key, pinned=True)
    assert "a.weight" in failure(capsys, "verify", "run/1")
    assert "a.weight" in failure(capsys, "load", "run/1", str(tmp_path / "x"))
    assert os.listdir(tmp_path / "x") == []
    assert run("rm", "run/1") == 0
    assert "run/1" in failure(capsys, "rm", "run/1")
    assert [each.prefix for each in checkpoint.list(pool)] == ["run/10"]


def with_header(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(first: int, last: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


@pytest.mark.parametrize("command", ["load", "verify", "rm"])
def test_missing_checkpoint_is_told_with_a_remedy(
    pool: mooncake.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    file = [str(tmp_path / "m.safetensors")] if command == "load" else []
    said = failure(capsys, command, "nope", *file)
    assert "prefix=nope" in said
    assert "@checkpoint" not in said
    assert said.endswith(
        "\n  hint: mooncake.checkpoint.list and `mooncake checkpoint ls` show those there are.\n"
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x00",
        struct.pack("<Q", 1 << 63) + b"{}",
        struct.pack("<Q", 3) + b"{}",
        with_header(b"{"),
        with_header([]),
        with_header(b"[" * 50_000),
        with_header({"w": tensor(0, 8, [2])}),
        with_header({"w": tensor(0, 8, [3])}, bytes(8)),
        with_header({"w": tensor(-8, 0, [2])}, bytes(8)),
        with_header({"w": tensor(0, 8, [-2])}, bytes(8)),
        with_header({"w": tensor(0, 8, [2.0])}, bytes(8)),
        with_header({"w": tensor(0, 8, [2], "F99")}, bytes(8)),
        with_header({"w": tensor(0, 8, [2]), "v": tensor(4, 12, [2])}, bytes(12)),
        with_header({"w": {}}),
        with_header({"__metadata__": []}),
    ],
)
def test_file_that_lies_is_refused_and_leaves_nothing(
    pool: mooncake.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    (tmp_path / "bad.safetensors").write_bytes(content)
    said = failure(capsys, "save", str(tmp_path / "bad.safetensors"), "run")
    assert "the file is no safetensors file" in said
    assert "bad.safetensors" in said
    assert "INVALID_PARAMS" in said
    assert list(pool.objects()) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"layer.0.a": "../model-0.safetensors"},
        {"layer.0.a": "model-1.safetensors"},
        {"other": "model-0.safetensors"},
    ],
)
def test_index_that_lies_is_refused(
    pool: mooncake.Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
) -> None:
    write_shards(tmp_path, **changes)
    assert "index" in failure(capsys, "save", str(tmp_path), "run")
    assert list(pool.objects()) == []


def test_tensors_of_one_name_in_two_files_are_refused(
    pool: mooncake.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        save_file(tensors(), tmp_path / f"{name}.safetensors")
    assert "same name" in failure(capsys, "save", str(tmp_path), "run")
    (tmp_path / "none").mkdir()
    assert "no .safetensors files" in failure(capsys, "save", str(tmp_path / "none"), "run")


@pytest.mark.parametrize("change", ["shorter", "other"])
def test_file_that_changes_while_it_is_read_is_refused(
    pool: mooncake.Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    path = tmp_path / "m.safetensors"
    save_file({f"w{at}": torch.ones(100) for at in range(4)}, path)
    opened = safetensors.FileTensors.document

    def changed(self: Any) -> Any:
        with open(path, "r+b") as file:
            if change == "shorter":
                file.truncate(600)
            else:
                file.seek(600)
                file.write(b"other")
        os.utime(path, ns=(1, 1))
        return opened(self)

    monkeypatch.setattr(safetensors.FileTensors, "document", changed)
    assert "changes while it is read" in failure(capsys, "save", str(path), "run")
    assert list(pool.keys()) == []


def test_file_that_does_not_fit_is_refused(
    pool: mooncake.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"w": torch.zeros(9 * MIB)}, tmp_path / "m.safetensors")
    assert "needed_bytes" in failure(capsys, "save", str(tmp_path / "m.safetensors"), "run")
    assert list(pool.objects()) == []


def test_list_of_files_that_leaves_its_folder_is_refused(
    pool: mooncake.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = {"files": {"../x": {"metadata": {}, "tensors": ["w"]}}, "index": ""}
    for text in (json.dumps(layout), "{", "[]"):
        checkpoint.save({"w": torch.ones(2)}, pool, "run", metadata={"safetensors": text})
        assert "list of files" in failure(capsys, "load", "run", str(tmp_path / "x"))
    assert os.listdir(tmp_path) == []


def test_checkpoint_of_the_api_becomes_a_file(
    pool: mooncake.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.save({"model": {"w": torch.ones(2)}, "step": 3}, pool, "run")
    assert run("load", "run", str(tmp_path / "out")) == 0
    assert load_file(tmp_path / "out/model.safetensors")["model.w"].tolist() == [1, 1]
    checkpoint.save({"z": torch.ones(2, dtype=torch.complex128)}, pool, "run")
    assert "tensor=z" in failure(capsys, "load", "run", str(tmp_path / "out"))


def test_slices_are_those_of_the_tensor(pool: mooncake.Store) -> None:
    whole = torch.arange(5 * 4 * 3.0).reshape(5, 4, 3)
    checkpoint.save({"a": {"w": whole}, "v": torch.tensor(2)}, pool, "run", metadata={"k": "v"})
    with checkpoint.safe_open(pool, "run") as file:
        assert file.keys() == ["a.w", "v"]
        assert file.metadata() == {"k": "v"}
        assert torch.equal(file.get_tensor("a.w"), whole)
        assert file.get_slice("v")[...] == 2
        part = file.get_slice("a.w")
        assert (part.get_shape(), part.get_dtype()) == ([5, 4, 3], "F32")
        for index in (
            np.s_[1:3],
            np.s_[-2:],
            np.s_[2],
            np.s_[-1, 1:3, 0],
            np.s_[..., 1],
            np.s_[1:5:2, ::3],
            np.s_[3:1],
            np.s_[:, 2, :],
            np.s_[1:2, ..., 0:2],
        ):
            assert torch.equal(part[index], whole[index]), index
        for wrong, error in (
            (np.s_[5], IndexError),
            (np.s_[0, 0, 0, 0], IndexError),
            (np.s_["x"], TypeError),
            (np.s_[::-1], ValueError),
        ):
            with pytest.raises(error):
                part[wrong]
        with pytest.raises(mooncake.NotFoundError, match="none"):
            file.get_slice("none")
    with checkpoint.safe_open(pool, "run", framework="numpy") as file:
        assert file.get_slice("a.w")[1:2].tolist() == whole[1:2].tolist()
    with pytest.raises(ValueError, match="framework"):
        checkpoint.safe_open(pool, "run", framework="jax")


def test_slice_reads_its_bytes_only(pool: mooncake.Store) -> None:
    checkpoint.save({"w": torch.zeros(1000, 1000)}, pool, "run")
    with checkpoint.safe_open(pool, "run") as file:
        before = read_bytes(pool)
        file.get_slice("w")[10:20]
        assert read_bytes(pool) - before == 40_000


def read_bytes(store: mooncake.Store) -> int:
    return sum(each["read_bytes"] for each in store.stats()["store"]["by_transport"].values())
