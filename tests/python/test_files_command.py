"""`mooncake put -r` and `get -r`: folders, prefixes and patterns."""

from __future__ import annotations

import contextlib
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import MIB, MasterProcess
from test_commands import command

import mooncake
from mooncake._command.main import main
from mooncake.files.patterns import fixed_part, matcher

FILES = {"a.bin": b"a" * 100, "empty": b"", "sub/b.bin": bytes(range(256)) * 50, "sub/c": b"c"}


@pytest.fixture
def store(master: MasterProcess):
    with mooncake.Store(master.address, mooncake.StoreConfig(segment_bytes=32 * MIB)) as store:
        yield store
        store.clear(force=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "from"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@dataclass
class Done:
    """What a command did."""

    returncode: int
    stdout: str
    stderr: str


def on(store: mooncake.Store, name: str, *words: str) -> Done:
    """Run a command in this process, which takes a tenth of the time of one of its own."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([name, f"--master={store.master_address}", *words])
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def content_of(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_folder_goes_to_the_pool_and_back(store, folder, tmp_path):
    master = f"--master={store.master_address}"
    done = command("put", master, "-r", f"{folder}", "run/1", "--tag=of=me")
    assert (done.returncode, done.stdout) == (0, "stored 4 files (12.6 KiB)\n"), done.stderr
    assert list(store.keys()) == [f"run/1/{name}" for name in FILES]
    assert store.get("run/1/sub/c") == b"c"
    assert store.info("run/1/sub/c").tags == {"of": "me"}
    store.put("run/10/x", b"x")
    done = command("get", master, "-r", "run/1", f"{tmp_path}/to")
    assert (done.returncode, done.stdout) == (0, "wrote 4 files (12.6 KiB)\n"), done.stderr
    assert content_of(tmp_path / "to") == FILES


def test_existing_files_are_kept_unless_they_are_overwritten(store, folder):
    store.put("p/a.bin", b"old")
    done = on(store, "put", "-r", f"{folder}", "p", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["kept"] == ["p/a.bin"]
    assert "p/a.bin exists and was kept" in done.stderr
    assert "--overwrite" in done.stderr
    assert (store.get("p/a.bin"), store.get("p/sub/c")) == (b"old", b"c")
    done = on(store, "put", "-r", f"{folder}", "p", "--overwrite", "--json")
    assert json.loads(done.stdout) == {"prefix": "p", "files": 4, "bytes": 12901, "kept": []}
    assert store.get("p/a.bin") == FILES["a.bin"]


def test_files_folders_and_patterns_keep_their_names(store, folder):
    done = on(store, "put", "-r", f"{folder}/a.bin", f"{folder}/sub", "p")
    assert done.returncode == 0, done.stderr
    assert list(store.keys()) == ["p/a.bin", "p/sub/b.bin", "p/sub/c"]
    done = on(store, "put", "-r", f"{folder}/**/*.bin", "q")
    assert done.returncode == 0, done.stderr
    assert list(store.keys("q")) == ["q/a.bin", "q/b.bin"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("run/*.bin", ["a.bin"]),
        ("run/**/*.bin", ["a.bin", "sub/b.bin"]),
        ("run/s*", ["sub/b.bin", "sub/c"]),
        ("run/sub/?", ["c"]),
        ("r*/sub/[a-b]*", ["run/sub/b.bin"]),
        ("run/sub/c", ["c"]),
        ("run/", ["a.bin", "empty", "sub/b.bin", "sub/c"]),
    ],
)
def test_patterns_of_keys(store, tmp_path, pattern, found):
    for name in FILES:
        store.put(f"run/{name}", name.encode())
    store.put("running/x", b"x")
    done = on(store, "get", "-r", pattern, f"{tmp_path}/to")
    assert done.returncode == 0, done.stderr
    assert sorted(content_of(tmp_path / "to")) == found


@pytest.mark.parametrize(
    ("pattern", "path", "is_match"),
    [
        ("a/*", "a/b", True),
        ("a/*", "a/b/c", True),
        ("a/*.x", "a/b/c.x", False),
        ("**", "a/b", True),
        ("a/**/c", "a/c", True),
        ("a/**/c", "a/b/b/c", True),
        ("a/**/c", "ab/c", False),
        ("[!a]b", "cb", True),
        ("[!a]b", "ab", False),
        ("a[.]b", "axb", False),
        ("a.b*", "axb", False),
        ("a+*", "a+1", True),
    ],
)
def test_matches_of_patterns(pattern, path, is_match):
    assert matcher(pattern)(path) is is_match


def test_fixed_part_of_patterns():
    assert [fixed_part(each) for each in ("a/b*/c", "*", "a/*", "a*")] == ["a", "", "a", ""]


@pytest.mark.parametrize("key", ["run/../../escaped", "run/..", "run/./x"])
def test_names_that_leave_the_folder_are_refused(store, tmp_path, key):
    store.put("run/a", b"1")
    store.put(key, b"2")
    done = on(store, "get", "-r", "run", f"{tmp_path}/to")
    assert done.returncode == 1
    assert f"{key} has a name that leads out of the folder; nothing was written" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_file_that_is_also_a_folder_is_refused(store, tmp_path):
    store.put("run/a/b", b"1")
    store.put("run/a", b"2")
    done = on(store, "get", "-r", "run", f"{tmp_path}/to")
    assert done.returncode == 1
    assert "run/a is a file, and run/a/b needs a folder of that name" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_move_is_a_failure(store, tmp_path):
    (tmp_path / "none").mkdir()
    for words, text in [
        (["get", "-r", "none", f"{tmp_path}/to"], "no file is below none"),
        (["get", "-r", "none/*", f"{tmp_path}/to"], "no file matches 'none/*'"),
        (["put", "-r", f"{tmp_path}/none", "p"], "no file in"),
        (["put", "-r", f"{tmp_path}/missing", "p"], "missing: No such file or directory"),
    ]:
        done = on(store, *words)
        assert done.returncode == 1
        assert text in done.stderr


def test_wrong_arguments_are_explained(store, tmp_path):
    for words, text in [
        (["put", "-r", "x"], "put -r takes folders or files, and a prefix last"),
        (["put", "-r", f"{tmp_path}", "a/../b"], "a/../b is no prefix of files"),
        (["put", "a", "b", "c"], "For more files add -r."),
        (["get", "-r", "x"], "get -r takes a prefix or a pattern, and a folder"),
        (["get", "a", "b", "c"], "For more files add -r."),
    ]:
        done = on(store, *words)
        assert done.returncode == 2, done.stderr
        assert text in done.stderr


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("key", "FOLDER"), "Give -r for a folder"),
        (("FOLDER", "key"), "Give -r for a folder"),
        (("FILE", "key"), "The key comes first"),
    ],
)
def test_wrong_order_of_arguments_is_explained(store, tmp_path, arguments, hint):
    (tmp_path / "file").write_bytes(b"x")
    names = {"FOLDER": str(tmp_path), "FILE": str(tmp_path / "file"), "key": "no/such"}
    done = command("put", *(names[each] for each in arguments), "--master", store.master_address)
    assert done.returncode == 1
    assert hint in done.stderr


def test_pipes_and_links_to_folders_are_refused(store, folder):
    os.mkfifo(folder / "pipe")
    done = on(store, "put", "-r", f"{folder}", "p")
    assert "pipe is neither a file nor a folder" in done.stderr
    os.unlink(folder / "pipe")
    (folder / "link").symlink_to(folder)
    done = on(store, "put", "-r", f"{folder}", "p")
    assert "link is a link to a folder" in done.stderr
    assert list(store.keys()) == []
    os.unlink(folder / "link")
    (folder / "link").symlink_to(folder / "a.bin")
    assert on(store, "put", "-r", f"{folder}", "p").returncode == 0
    assert store.get("p/link") == FILES["a.bin"]


def test_full_pool_says_how_far_it_came(store, tmp_path):
    (tmp_path / "from").mkdir()
    (tmp_path / "from/a").write_bytes(b"a")
    (tmp_path / "from/b").write_bytes(bytes(40 * MIB))
    done = on(store, "put", "-r", f"{tmp_path}/from", "p")
    assert done.returncode == 1
    assert "stopped: 1 of 2 files stored, each whole" in done.stderr
    assert "NO_AVAILABLE_HANDLE" in done.stderr
    assert list(store.keys()) == ["p/a"]


def test_single_empty_files(store, tmp_path):
    with store.file("empty", "wb"):
        pass
    done = on(store, "cp", "empty", "copy")
    assert done.returncode == 0, done.stderr
    done = on(store, "get", "copy", f"{tmp_path}/file")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_bytes() == b""


def test_keys_with_an_empty_part_are_named_as_left_out(store, tmp_path):
    for key in ("run//a", "run/a", "run/b/", "running/"):
        store.put(key, b"x")
    done = on(store, "get", "-r", "run", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "wrote 1 file (1 B)\n")
    assert "2 left out, since a part of the key has no name: run//a, run/b/" in done.stderr
    assert "mooncake get KEY FILE" in done.stderr
    done = on(store, "get", "-r", "run/b*", str(tmp_path))
    assert done.returncode == 1
    assert "1 left out, since a part of the key has no name: run/b/" in done.stderr
    assert "no file matches" in done.stderr
