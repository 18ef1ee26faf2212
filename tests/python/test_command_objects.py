"""The `mooncake` command on objects and segments: listings, removals, files, terminals, drains."""

from __future__ import annotations

import json
import os
import pickle
import pty
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import MIB, MasterProcess, start_master
from test_commands import command, read_until

import mooncake
from mooncake._command import files, pool as _pool, progress
from mooncake._command.output import quoted
from mooncake._units import format_bytes
from mooncake.tensor import Layout


@pytest.fixture(scope="module")
def pool() -> Iterator[MasterProcess]:
    """A pool with two segments, five objects under two prefixes, and one that is pinned."""
    master = start_master("--default_kv_lease_ttl=600s")
    lends = mooncake.StoreConfig(segment_bytes=64 * MIB, name="localhost:7001")
    try:
        with mooncake.Store(master.address, lends) as store:
            store.put_many({f"kv/a/{at}": bytes(1000) for at in range(3)})
            store.put_many({f"kv/b/{at}": bytes(4000) for at in range(2)})
            store.put("pinned", b"p", options=mooncake.PutOptions(is_hard_pinned=True))
            yield master
    finally:
        master.stop()


def on(pool: MasterProcess, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    return command(name, f"--master={pool.address}", *words)


def on_terminal(pool: MasterProcess, name: str, *words: str, typed: bytes = b"") -> bytes:
    """Run a command on a terminal and return what it shows."""
    words = ("-m", "mooncake", name, f"--master={pool.address}", *words)
    return shown_by([sys.executable, *words], typed=typed)


def shown_by(line: list[str], *, typed: bytes = b"") -> bytes:
    """Run a program on a terminal and return what it shows."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(line, stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    try:
        shown = b""
        if typed:
            shown = read_until(leader, b"[y/N]")
            os.write(leader, typed)
        try:
            while piece := os.read(leader, 1 << 16):
                shown += piece
        except OSError:
            # The terminal was closed with the process.
            pass
        process.wait(20)
        return shown
    finally:
        process.kill()
        process.wait(10)
        os.close(leader)


def test_ls_adds_up_groups(pool: MasterProcess):
    done = on(pool, "ls", "kv/", "--delimiter=/", "--sort=size", "--json")
    assert json.loads(done.stdout) == [
        {"prefix": "kv/b/", "objects": 2, "bytes": 8000, "memory_bytes": 8000, "disk_bytes": 0},
        {"prefix": "kv/a/", "objects": 3, "bytes": 3000, "memory_bytes": 3000, "disk_bytes": 0},
    ]
    shown = [line.split() for line in on(pool, "ls", "kv/", "--delimiter=/").stdout.splitlines()]
    assert [line[-1] for line in shown] == ["kv/a/", "kv/b/"]


def test_ls_names_the_largest_object(pool: MasterProcess):
    done = on(pool, "ls", "kv/", "--sort=memory", "--limit=1", "--bytes")
    assert done.stdout.split() == ["4000", "x1", "kv/b/0"]
    assert done.stderr == "", "the limit was asked for"
    assert on(pool, "ls", "kv/a", "--keys").stdout.split() == ["kv/a/0", "kv/a/1", "kv/a/2"]


def test_ls_counts(pool: MasterProcess):
    assert on(pool, "ls", "kv/a", "--count", "--bytes").stdout.startswith("3 objects, 3000;")
    found = json.loads(on(pool, "ls", "none/", "--count", "--json").stdout)
    assert found == {"objects": 0, "bytes": 0, "memory_bytes": 0, "disk_bytes": 0}
    assert json.loads(on(pool, "ls", "none/", "--json").stdout) == []


def test_keys_are_quoted_on_a_terminal(pool: MasterProcess):
    key = "esc/a\nb\x1b[31mred"
    with mooncake.Store(pool.address) as store:
        store.put(key, b"1")
        shown = on_terminal(pool, "ls", "esc/")
        assert b"\x1b[31m" not in shown
        assert b"$'esc/a\\nb\\x1b[31mred'" in shown
        store.delete(key)


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("plain/key@1", "plain/key@1"),
        ("naïve/键", "naïve/键"),
        ("two words", "'two words'"),
        ("it's", "'it'\\''s'"),
        ("", "''"),
        (b"\xff\n", "$'\\xff\\n'"),
    ],
)
def test_quoted_keys_are_words_of_a_shell(key, shown):
    assert quoted(key) == shown
    echoed = subprocess.run(["bash", "-c", f"printf %s {shown}"], capture_output=True, check=True)
    assert echoed.stdout == os.fsencode(key)


def test_rm_removes_a_prefix(pool: MasterProcess):
    with mooncake.Store(pool.address) as store:
        store.put_many({f"old/{at}": b"x" for at in range(4)})
        store.lease("old/2").renew()
        assert on(pool, "rm", "-r", "old/", "--dry-run").returncode == 0
        assert store.exists("old/0"), "a dry run removes nothing"
        done = on(pool, "rm", "-r", "old/")
        assert (done.returncode, done.stdout) == (1, "removed 3 objects\n")
        assert 'key="old/2"' in done.stderr, "it is leased"
        assert on(pool, "rm", "-r", "--force", "old/").stdout == "removed 1 object\n"
        star = on(pool, "rm", "kv/*")
        assert (star.returncode, "--recursive" in star.stderr) == (1, True)
        assert sum(1 for _ in store.keys("kv/")) == 5


def test_dry_run_shows_sizes_sum_and_leases(pool: MasterProcess):
    with mooncake.Store(pool.address) as store:
        store.put_many({f"dry/{at}": bytes(1024) for at in range(3)})
        store.lease("dry/1").renew()
        done = on(pool, "rm", "-r", "dry/", "--dry-run")
        text = "would remove 2 objects, 2 KiB; with all copies 2 KiB"
        assert done.stdout.splitlines() == [
            "would remove       1 KiB  dry/0",
            "would keep         1 KiB  dry/1  leased",
            "would remove       1 KiB  dry/2",
            f"{text}; 1 object leased, which --force removes",
        ]
        forced = on(pool, "rm", "-r", "--force", "dry/", "--dry-run").stdout
        assert forced.endswith("would remove 3 objects, 3 KiB; with all copies 3 KiB\n")
        seen = json.loads(on(pool, "rm", "dry/1", "dry/2", "--dry-run", "--json").stdout)
        assert seen == {
            "would_remove": ["dry/2"],
            "leased": ["dry/1"],
            "kept": [],
            "bytes": 1024,
            "memory_bytes": 1024,
        }
        store.clear("dry/", force=True)
    none = on(pool, "rm", "-r", "none/", "--dry-run")
    assert (none.returncode, none.stdout[:22]) == (0, "would remove 0 objects")
    for words in (["none"], ["none", "--dry-run"]):
        missing = on(pool, "rm", *words)
        assert (missing.returncode, missing.stdout) == (1, "")
        assert missing.stderr == "mooncake: no object has the key none (-704 OBJECT_NOT_FOUND)\n"


def test_dry_run_without_admin_port_says_that_leased_objects_stay():
    with mooncake.Store(config=mooncake.StoreConfig(segment_bytes=16 * MIB)) as store:
        store.put("k", b"1")
        done = command("rm", f"--master={store.master_address}", "k", "--dry-run")
    assert done.stdout.splitlines()[-1].endswith("those that are leased would stay without --force")


def test_rm_refuses_an_empty_prefix_and_names_all(pool: MasterProcess):
    for words in (["-r", ""], ["-r", "old/", ""], ["-r", "--force", "--yes", ""]):
        done = on(pool, "rm", *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert "--all" in done.stderr
    for words, named in (([], "--all"), (["--all"], "--yes"), (["--all", "k"], "no keys")):
        done = on(pool, "rm", *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert named in done.stderr
    with mooncake.Store(pool.address) as store:
        assert sum(1 for _ in store) >= 6


def test_rm_all_asks_and_leaves_hard_pinned_objects():
    master = start_master()
    lends = mooncake.StoreConfig(segment_bytes=64 * MIB)
    pinned = mooncake.PutOptions(is_hard_pinned=True)
    try:
        with mooncake.Store(master.address, lends) as store:
            store.put_many({"a": b"1", "b": b"2"})
            store.put("p", b"3", options=pinned)
            shown = on_terminal(master, "rm", "--all", typed=b"n\n")
            assert b"remove all 3 objects (3 B) in the pool of" in shown
            assert store.exists_many(["a", "b", "p"]) == [True] * 3
            dry = on(master, "rm", "--all", "--dry-run").stdout
            assert "hard-pinned, which --pinned removes" in dry
            done = on(master, "rm", "--all", "--yes", "--force")
            assert (done.returncode, done.stdout) == (1, "removed 2 objects\n")
            assert "hard-pinned" in done.stderr
            assert store.exists_many(["a", "b", "p"]) == [False, False, True]
            assert on(master, "rm", "-r", "p", "--force").returncode == 1
            assert on(master, "rm", "p", "--pinned").returncode == 0
            assert store.exists("p") is False
    finally:
        master.stop()


def test_removals_of_our_api_leave_hard_pinned_objects():
    pinned = mooncake.PutOptions(is_hard_pinned=True)
    with mooncake.Store(config=mooncake.StoreConfig(segment_bytes=16 * MIB)) as store:
        store.put("p", b"1", options=pinned)
        store.put("a", b"1")
        with pytest.raises(mooncake.BusyError, match="hard-pinned"):
            store.delete("p", force=True)
        assert "hard-pinned" in str(store.delete_many(["p"], force=True).kept["p"])
        cleared = store.clear(force=True)
        assert (cleared, cleared.removed, cleared.kept, cleared.pinned) == (1, 1, 1, 1)
        assert pickle.loads(pickle.dumps(cleared)).pinned == 1
        assert list(store.keys()) == ["p"]
        assert store.clear(pinned=True, force=True) == 1
        store.put("p", b"1", options=pinned)
        store.delete("p", pinned=True)
        assert not store.exists("p")


def test_rm_asks_on_a_terminal(pool: MasterProcess):
    with mooncake.Store(pool.address) as store:
        store.put_many({"ask/1": b"x", "ask/2": b"y"})
        shown = on_terminal(pool, "rm", "-r", "ask/", typed=b"n\n")
        assert f"remove 2 objects (2 B) under ask/ in the pool of {pool.address}?" in shown.decode()
        assert store.exists_many(["ask/1", "ask/2"]) == [True, True]
        on_terminal(pool, "rm", "-r", "ask/", typed=b"y\n")
        assert store.exists_many(["ask/1", "ask/2"]) == [False, False]


def test_stat_of_a_tensor_in_shards_is_that_of_an_object(pool: MasterProcess):
    with mooncake.Store(pool.address) as store:
        options = mooncake.PutOptions(is_hard_pinned=True)
        store.put_array("split", np.arange(12.0), layout=Layout(2), options=options)
        (listed,) = store.objects("split")
        assert store.info("split").size == listed.size
        assert store.info("split").is_hard_pinned
        text = on(pool, "stat", "split").stdout
        assert "lease     none\npins      hard, never evicted\n" in text
        for part in ("split_tp_0", "split_tp_1"):
            assert f"copy      {part}  localhost:7001  at " in text
        with store.lease("split"):
            assert "s left; not evicted" in on(pool, "stat", "split").stdout
            parts = json.loads(on(pool, "stat", "split", "--json").stdout)["tensor"]["parts"]
            assert all(part["lease_left_ms"] > 0 for part in parts)
            assert [part["key"] for part in parts] == ["split_tp_0", "split_tp_1"]
        store.delete("split", pinned=True, force=True)


def test_stat_shows_copies_leases_and_pins(pool: MasterProcess):
    seen = json.loads(on(pool, "stat", "pinned", "--json").stdout)
    assert (seen["bytes"], seen["is_hard_pinned"], seen["lease_left_ms"]) == (1, True, 0)
    assert [copy["segment"] for copy in seen["copies"]] == ["localhost:7001"]
    with mooncake.Store(pool.address) as store:
        store.lease("kv/a/0").renew()
    text = on(pool, "stat", "kv/a/0").stdout
    assert "s left; not evicted" in text
    assert "copy      localhost:7001  at " in text
    none = on(pool, "stat", "none")
    assert (none.returncode, none.stdout) == (1, "")
    assert none.stderr == "mooncake: no object has the key none (-704 OBJECT_NOT_FOUND)\n"


def test_line_of_an_empty_pool_lends_memory(mortal_master: MasterProcess):
    """`stat` and `segments` of an empty pool show a command line that works as it stands."""
    shown = on(mortal_master, "stat").stdout
    [line] = [line.strip() for line in shown.splitlines() if "mooncake_client" in line]
    assert f"`{line}`" in on(mortal_master, "segments").stderr
    program, *words = shlex.split(line)
    assert (program, words[-1]) == ("mooncake_client", "--global_segment_size=1GB")
    # Port and size differ, so that other daemons and little memory do not matter.
    words = ["-m", "mooncake.cli_client", *words[:-1], "--global_segment_size=16MB", "--port=0"]
    daemon = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert daemon.stdout is not None
        assert "mooncake_client ready" in daemon.stdout.readline()
        [segment] = json.loads(on(mortal_master, "segments", "--json").stdout)
        assert segment["capacity_bytes"] == 16 * MIB
    finally:
        daemon.terminate()
        daemon.communicate(timeout=20)


def test_stat_says_that_sizes_are_rounded_up(mortal_master: MasterProcess):
    lends = mooncake.StoreConfig(segment_bytes=16 * MIB)
    with mooncake.Store(mortal_master.address, lends) as store:
        assert "multiple" not in on(mortal_master, "stat").stdout
        store.put_many({"a": bytes(31), "b": bytes(3)})
        shown = on(mortal_master, "stat").stdout
        assert "40 B of 16 MiB used; each copy takes a multiple of 8 bytes" in shown
        assert "   16 MiB  free" in shown, "not 1024.0 of the next smaller unit"


def test_stat_says_why_puts_fail():
    """A pool full of leased objects shows that leases hold its memory."""
    master = start_master("--default_kv_lease_ttl=600s")
    lends = mooncake.StoreConfig(segment_bytes=16 * MIB)
    try:
        with mooncake.Store(master.address, lends) as store:
            for at in range(4):
                store.put(f"k{at}", bytes(4 * MIB))
                store.lease(f"k{at}").renew()
            with pytest.raises(mooncake.NoSpaceError):
                store.put("more", bytes(4 * MIB))
            seen = json.loads(on(master, "stat", "--json").stdout)
            assert seen["memory"]["leased_bytes"] == 16 * MIB
            assert (seen["clients"], seen["page"]) == (1, f"{master.admin}/")
            text = on(master, "stat").stdout
            assert "16 MiB  leased" in text
            assert "puts find no memory now" in text
    finally:
        master.stop()


def test_stat_names_drained_segments(mortal_master: MasterProcess):
    lends = mooncake.StoreConfig(segment_bytes=16 * MIB, name="localhost:7021")
    other = mooncake.StoreConfig(segment_bytes=16 * MIB, name="127.0.0.1:7022")
    with mooncake.Store(mortal_master.address, lends) as store:
        store.drain(["localhost:7021"]).wait()
        seen = on(mortal_master, "stat").stdout
        assert "puts find no memory now: every segment was drained" in seen
        assert "nothing is free" not in seen
        with mooncake.Store(mortal_master.address, other) as full:
            for at in range(4):
                full.put(f"k{at}", bytes(4 * MIB), options=mooncake.PutOptions(is_hard_pinned=True))
            assert "nothing is free in segments not drained" in on(mortal_master, "stat").stdout
            for name in ("stat", "segments"):
                assert re.search(r"localhost:7021 .* no, drained  ", on(mortal_master, name).stdout)
                assert re.search(r"127.0.0.1:7022 .* yes  ", on(mortal_master, name).stdout)
            listed = json.loads(on(mortal_master, "segments", "--json").stdout)
            assert sorted(each["state"] for each in listed) == ["drained", "ok"]


def test_get_replaces_a_file_only_when_complete(pool: MasterProcess, tmp_path):
    target = tmp_path / "target"
    target.write_bytes(b"before")
    target.chmod(0o640)
    assert on(pool, "get", "none", str(target)).returncode == 1
    assert target.read_bytes() == b"before"
    assert on(pool, "get", "kv/a/0", str(target)).returncode == 0
    assert target.read_bytes() == bytes(1000)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["target"], "no partial file is left"


def test_large_objects_are_read_in_pieces(pool: MasterProcess, large: bytes, tmp_path):
    got = tmp_path / "got"
    subprocess.run(in_pieces(pool, "get", "large", str(got)), check=True, timeout=50)
    assert got.read_bytes() == large


def test_get_keeps_binary_data_off_a_terminal(pool: MasterProcess):
    refused = on_terminal(pool, "get", "kv/a/0")
    assert b"kv/a/0 is binary (1000 B)" in refused
    assert b"\0" not in refused
    assert bytes(1000) in on_terminal(pool, "get", "--force", "kv/a/0")
    with mooncake.Store(pool.address) as store:
        store.put("text", "grüße\n".encode(), overwrite=True)
        assert on_terminal(pool, "get", "text") == "grüße\r\n".encode()
        store.delete("text", force=True)


def test_cp_copies_to_another_key(pool: MasterProcess):
    assert on(pool, "cp", "kv/a/0", "copy").returncode == 0
    kept = on(pool, "cp", "pinned", "copy")
    assert (kept.returncode, "exists and was kept" in kept.stderr) == (1, True)
    done = on(pool, "cp", "pinned", "copy", "--overwrite", "--json")
    assert json.loads(done.stdout) == {"key": "copy", "bytes": 1, "is_stored": True}
    with mooncake.Store(pool.address) as store:
        assert store.get("copy") == b"p"
        store.delete("copy", force=True)


# Runs a command that moves objects above 1 MiB in pieces of 300 KiB, and shows progress at once.
_IN_PIECES = """
import sys
from mooncake._command import files, main, progress
files._WHOLE_BYTES, files._CHUNK_BYTES = 1 << 20, 300 << 10
progress._SLOW_S = progress._STEP_S = 0
sys.exit(main.main(sys.argv[1:]))
"""


def in_pieces(pool: MasterProcess, name: str, *words: str) -> list[str]:
    return [sys.executable, "-c", _IN_PIECES, name, f"--master={pool.address}", *words]


@pytest.fixture
def large(pool: MasterProcess) -> Iterator[bytes]:
    """The value of an object of 5 MiB."""
    value = os.urandom(MIB) * 5
    with mooncake.Store(pool.address) as store:
        store.put("large", value)
        yield value
        store.clear("large", force=True)


def test_large_object_is_copied_in_pieces(pool: MasterProcess, large: bytes):
    words = in_pieces(pool, "cp", "large", "large/copy", "--json")
    done = subprocess.run(words, capture_output=True, text=True, timeout=50, check=True)
    copied = {"key": "large/copy", "bytes": len(large), "is_stored": True}
    assert json.loads(done.stdout) == copied
    again = subprocess.run(words, capture_output=True, text=True, timeout=50, check=False)
    assert (again.returncode, json.loads(again.stdout)) == (1, {**copied, "is_stored": False})
    with mooncake.Store(pool.address) as store:
        assert store.get("large/copy") == large
        store.put("large", large[1:], overwrite=True)
        for target in ("large/copy", "large"):
            subprocess.run([*in_pieces(pool, "cp", "large", target), "--overwrite"], check=True)
            assert store.get(target) == large[1:]


def test_cp_that_fails_leaves_no_object(pool: MasterProcess, large: bytes):
    with mooncake.Store(pool.address) as store:

        def pieces() -> Iterator[memoryview]:
            yield memoryview(bytearray(large[:1000]))
            raise mooncake.DeadlineError("the source does not answer")

        with pytest.raises(mooncake.DeadlineError):
            files._put_pieces(store, b"large/copy", len(large), pieces(), overwrite=False)
        assert not store.exists("large/copy")
        assert store.put("large/copy", b"1"), "the key is free again"


def test_long_standard_input_is_put_whole(pool: MasterProcess, tmp_path: Path):
    value = os.urandom(3 * MIB + 1)
    (tmp_path / "file").write_bytes(value)
    for words in (["cat", "file", "|"], ["exec", "<file"]):
        put = shlex.join(in_pieces(pool, "put", "large/piped", "--overwrite"))
        line = f"{' '.join(words)}; {put}" if words[0] == "exec" else f"{' '.join(words)} {put}"
        subprocess.run(["bash", "-c", line], cwd=tmp_path, timeout=50, check=True)
        with mooncake.Store(pool.address) as store:
            assert store.get("large/piped") == value
            store.delete("large/piped", force=True)


@pytest.mark.parametrize("verb", ["get", "cp"])
def test_progress_is_shown_on_a_terminal_and_cleared(
    pool: MasterProcess, large: bytes, tmp_path: Path, verb: str
):
    target = {"get": str(tmp_path / "file"), "cp": "large/copy"}[verb]
    shown = shown_by(in_pieces(pool, verb, "large", target))
    assert f"\r{verb} large: 300 KiB of 5 MiB (6%), ".encode() in shown
    assert f"\r{verb} large: 5 MiB of 5 MiB (100%), ".encode() in shown
    closing = rf"\r\x1b\[K{verb} large: 5 MiB in [0-9.]+ s, [0-9.]+ [KMG]iB/s\r\n"
    assert re.search(closing.encode() + b"$", shown), "the line is cleared"
    piped = subprocess.run(
        [*in_pieces(pool, verb, "large", target), *(["--overwrite"] if verb == "cp" else [])],
        capture_output=True,
        timeout=50,
        check=True,
    )
    assert piped.stderr == b"", "without a terminal there is no progress"


@pytest.mark.parametrize("size", [1000, 3 * MIB])
def test_put_of_a_pipe_shows_what_it_has_read(pool: MasterProcess, size: int):
    put = shlex.join(in_pieces(pool, "put", "large/piped", "--overwrite"))
    line = f"set -o pipefail; head -c {size} /dev/zero | {put}"
    shown = shown_by(["bash", "-c", line])
    steps = re.findall(rb"\rread [^:\r]*: ([0-9.]+ [KM]?i?B), [^\r]*/s", shown)
    assert steps[-1].decode() == format_bytes(size), shown
    with mooncake.Store(pool.address) as store:
        assert store.size("large/piped") == size
        store.delete("large/piped", force=True)


def test_progress_of_a_put_comes_from_its_counters(
    pool: MasterProcess, monkeypatch: pytest.MonkeyPatch
):
    leader, follower = pty.openpty()
    monkeypatch.setattr(progress, "_SLOW_S", 0)
    with (
        os.fdopen(leader, "rb", 0) as terminal,
        os.fdopen(follower, "w") as written,
        mooncake.Store(pool.address) as store,
    ):
        monkeypatch.setattr(sys, "stderr", written)
        with files._ticking(progress.Progress("put", "k", 2 * MIB, None), 2 * MIB, store):
            store.put("large/half", bytes(MIB))
            read_until(terminal.fileno(), b"put k: 1 MiB of 2 MiB (50%)")
        assert b"\r\x1b[K" in read_until(terminal.fileno(), b"\r\x1b[K")
        store.delete("large/half", force=True)


def test_get_prints_json_about_its_file(pool: MasterProcess, tmp_path: Path):
    file = str(tmp_path / "file")
    done = on(pool, "get", "kv/a/0", file, "--json")
    assert json.loads(done.stdout) == {"key": "kv/a/0", "bytes": 1000, "file": file}
    wrong = on(pool, "get", "kv/a/0", "--json")
    assert (wrong.returncode, wrong.stdout) == (2, "")


def test_expire_continues_past_a_missing_key(pool: MasterProcess):
    with mooncake.Store(pool.address) as store:
        store.put_many({"fleeting/1": b"1", "fleeting/2": b"2"})
        keys = ["fleeting/1", "none", "fleeting/2"]
        done = on(pool, "expire", *keys, "1h", "--json")
        failed = [{"key": "none", "code": "OBJECT_NOT_FOUND", "number": -704}]
        assert json.loads(done.stdout) == {"changed": 2, "failed": failed}
        text = "mooncake: no object has the key none (-704 OBJECT_NOT_FOUND)\n"
        assert (done.returncode, done.stderr) == (1, text)
        assert [store.info(key).expires_in_s is None for key in keys[::2]] == [False, False]
        kept = on(pool, "expire", "fleeting/1", "fleeting/2", "never")
        assert (kept.returncode, kept.stdout, kept.stderr) == (0, "", "")
        assert [store.info(key).expires_in_s for key in keys[::2]] == [None, None]
        store.clear("fleeting/", force=True)


@pytest.mark.parametrize(
    "words",
    [
        *(["get", "a none"], ["get", "a none", "/dev/null"], ["cp", "a none", "to"]),
        *(["rm", "a none"], ["expire", "a none", "1h"], ["stat", "a none"]),
    ],
)
def test_missing_key_has_one_text(pool: MasterProcess, words: list[str]):
    done = on(pool, *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "mooncake: no object has the key 'a none' (-704 OBJECT_NOT_FOUND)\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["put", "k", "/nowhere/at all"], "'/nowhere/at all': No such file or directory"),
        (["put", "k", "/"], "/: Is a directory"),
        (["get", "pinned", "/nowhere/file"], "/nowhere: No such file or directory"),
        (["put", "k" * 70_000, "/dev/null"], ""),
        (["put", "k", "/dev/null"], ""),
    ],
)
def test_failures_are_words_without_an_empty_hint(pool: MasterProcess, words: list[str], text: str):
    done = on(pool, *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert "[Errno" not in done.stderr
    assert "the message names it" not in done.stderr
    assert text in done.stderr


def test_exists_answers_by_exit_code(pool: MasterProcess):
    assert on(pool, "exists", "pinned", "-q").returncode == 0
    done = on(pool, "exists", "pinned", "none")
    assert (done.returncode, done.stdout) == (1, "yes  pinned\nno   none\n")
    unknown = command("exists", "--master=127.0.0.1:1", "pinned", "-q")
    assert (unknown.returncode, unknown.stdout) == (2, ""), "neither yes nor no"
    assert "2 no answer" in command("exists", "--help").stdout


def test_segments_and_clients_are_listed(pool: MasterProcess):
    [segment] = json.loads(on(pool, "segments", "--json").stdout)
    assert (segment["name"], segment["capacity_bytes"]) == ("localhost:7001", 64 * MIB)
    [client] = json.loads(on(pool, "clients", "--json").stdout)
    assert (client["name"], client["lent_bytes"]) == ("localhost:7001", 64 * MIB)
    assert "localhost:7001" in on(pool, "clients").stdout


def test_drain_empties_a_host_and_proves_it(mortal_master: MasterProcess):
    pool = mortal_master
    first = mooncake.StoreConfig(segment_bytes=16 * MIB, name="localhost:7011")
    second = mooncake.StoreConfig(segment_bytes=16 * MIB, name="127.0.0.1:7012")
    with mooncake.Store(pool.address, first) as store:
        store.put_many({f"k{at}": bytes(1000) for at in range(10)})
        with mooncake.Store(pool.address, second) as other:
            done = on(pool, "drain", "localhost")
            assert done.returncode == 0, done.stderr
            assert "localhost:7011 holds no object; its process may be stopped" in done.stdout
            again = on(pool, "drain", "localhost")
            assert (again.returncode, "its process may be stopped" in again.stdout) == (0, True)
            job = again.stdout.split()[1]
            ended = on(pool, "drain", f"--cancel={job}")
            assert ended.returncode != 0
            assert "has ended, so there is nothing to cancel" in ended.stderr
            assert "leader" not in ended.stderr
            store.close()
            assert other.get("k9") == bytes(1000)
            wrong = on(pool, "drain", "127.0.0.1:7013")
            assert (wrong.returncode, wrong.stdout) == (1, "")
            assert "Did you mean 127.0.0.1:7012?" in wrong.stderr


def test_drain_without_destination_fails_at_once(mortal_master: MasterProcess):
    lends = mooncake.StoreConfig(segment_bytes=16 * MIB, name="localhost:7018")
    with mooncake.Store(mortal_master.address, lends) as store:
        store.put_many({f"k{at}": bytes(1000) for at in range(100)})
        done = on(mortal_master, "drain", "localhost")
        assert done.returncode == 1
        assert "message   no other segment accepts objects" in done.stdout
        assert "0 failed" in done.stdout, "no move was tried"
        assert store.put("k", b"v"), "the segment takes objects again"


def test_drain_of_all_memory_asks_on_a_terminal(mortal_master: MasterProcess):
    address = mortal_master.address
    lenders = [
        mooncake.StoreConfig(segment_bytes=16 * MIB, name=f"localhost:{port}")
        for port in (7021, 7022)
    ]
    elsewhere = mooncake.StoreConfig(segment_bytes=16 * MIB, name="127.0.0.1:7023")
    with mooncake.Store(address, lenders[0]), mooncake.Store(address, lenders[1]) as store:
        shown = on_terminal(mortal_master, "drain", "localhost", typed=b"n\n").decode()
        assert f"drain all 2 segments of the pool of {address}?" in shown
        assert shown.count("127.0.0.1") >= 1
        assert "localhost:7021" in shown
        assert "localhost:7022" in shown
        assert all(segment.takes_objects for segment in store.segments()), "nothing was drained"
        with mooncake.Store(address, elsewhere):
            shown = on_terminal(mortal_master, "drain", "localhost").decode()
            assert "[y/N]" not in shown, "another segment takes the objects"
            assert "localhost:7021 holds no object" in shown


def test_segments_and_clients_are_sorted(mortal_master: MasterProcess):
    address = mortal_master.address
    small = mooncake.StoreConfig(segment_bytes=16 * MIB, name="localhost:7031")
    large = mooncake.StoreConfig(segment_bytes=32 * MIB, name="localhost:7032")
    with mooncake.Store(address, small) as store:
        store.put("k", bytes(MIB))
        with mooncake.Store(address, large):

            def order(name: str, *words: str) -> list[str]:
                rows = json.loads(on(mortal_master, name, "--json", *words).stdout)
                return [row["name"].rpartition(":")[2] for row in rows]

            assert order("segments") == ["7031", "7032"]
            assert order("segments", "--sort=used") == ["7031", "7032"]
            assert order("segments", "--sort=free") == ["7032", "7031"]
            assert order("segments", "--sort=size") == ["7032", "7031"]
            assert order("clients") == ["7031", "7032"]
            assert order("clients", "--sort=lends") == ["7032", "7031"]


def test_drain_evicts_only_if_allowed(mortal_master: MasterProcess):
    first = mooncake.StoreConfig(segment_bytes=16 * MIB, name="localhost:7031")
    second = mooncake.StoreConfig(segment_bytes=16 * MIB, name="127.0.0.1:7032")
    with (
        mooncake.Store(mortal_master.address, first) as store,
        mooncake.Store(mortal_master.address, second) as other,
    ):
        here = mooncake.PutOptions(preferred_segments=["localhost:7031"])
        there = mooncake.PutOptions(preferred_segments=["127.0.0.1:7032"])
        names = [f"d/{at}" for at in range(6)]
        store.put_many({name: bytes(5 * MIB) for name in names[:3]}, options=here)
        other.put_many({name: bytes(5 * MIB) for name in names[3:5]}, options=there)
        other.put(names[5], bytes(2 * MIB), options=there)
        done = on(mortal_master, "drain", "localhost")
        assert done.returncode == 1
        assert "3 objects could not be moved" in done.stdout
        assert "needed_bytes=5242880 free_bytes=" in done.stdout
        assert "evicted " not in done.stdout
        assert store.exists_many(names) == [True] * 6
        done = on(mortal_master, "drain", "--evict", "localhost")
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.search(r"^evicted   (\d+) other objects", done.stdout, re.MULTILINE)
        assert found is not None
        assert other.exists_many(names).count(False) == int(found[1])


def test_failed_drain_leaves_an_emptied_host_drained(mortal_master: MasterProcess):
    first = mooncake.StoreConfig(segment_bytes=16 * MIB, name="localhost:7033")
    second = mooncake.StoreConfig(segment_bytes=16 * MIB, name="127.0.0.1:7034")
    with mooncake.Store(mortal_master.address, first) as store:
        store.put("k", bytes(MIB))
        with mooncake.Store(mortal_master.address, second) as other:
            assert on(mortal_master, "drain", "localhost").returncode == 0
            done = on(mortal_master, "drain", "localhost", "127.0.0.1")
            assert (done.returncode, "no other segment accepts" in done.stdout) == (1, True)
            assert "localhost:7033 holds no object; its process may be stopped" in done.stdout
            assert "127.0.0.1:7034 holds " in done.stdout
            assert re.search(r"localhost:7033 .* no, drained", on(mortal_master, "segments").stdout)
            assert other.get("k") == bytes(MIB)


def test_drain_shows_progress_without_a_terminal(
    mortal_master: MasterProcess,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """The other segment is full of pinned objects, so that the job waits until it is cancelled."""
    monkeypatch.setattr(_pool, "_REPORT_S", 0.05)
    full = mooncake.StoreConfig(segment_bytes=16 * MIB, name="127.0.0.1:7016")
    lends = mooncake.StoreConfig(segment_bytes=16 * MIB, name="localhost:7015")
    pinned = mooncake.PutOptions(is_hard_pinned=True)
    with mooncake.Store(mortal_master.address, full) as other:
        other.put_many({f"full/{at}": bytes(4 * MIB) for at in range(4)}, options=pinned)
        with mooncake.Store(mortal_master.address, lends) as store:
            store.put("k", bytes(MIB), options=pinned)
            job = store.drain("localhost:7015")
            seen = list[str]()
            show = _pool._show

            def show_and_cancel(info: mooncake.DrainInfo) -> None:
                show(info)
                seen.append(info.state)
                job.cancel()

            monkeypatch.setattr(_pool, "_show", show_and_cancel)
            _pool._wait(job)
            assert job.info().state == "canceled"
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mooncake: {seen[0]}: 0 copies moved (0 B), ")


def test_drain_says_how_to_cancel_it(mortal_master: MasterProcess):
    lends = mooncake.StoreConfig(segment_bytes=16 * MIB, name="localhost:7017")
    with mooncake.Store(mortal_master.address, lends):
        note = on(mortal_master, "drain", "localhost").stderr.splitlines()[0]
        found = re.search(r"continues if this command ends; `(mooncake drain .*)` ends it$", note)
        assert found is not None, note
        *words, job = shlex.split(found[1])
        assert words == ["mooncake", "drain", "--master", mortal_master.address, "--cancel"]
        assert f"job       {job}\n" in on(mortal_master, "drain", f"--status={job}").stdout


def test_drain_waits_until_moved_memory_is_free(tmp_path: Path):
    # With a log, memory stays in use until the record of its removal is on disk.
    pool = start_master(f"--state_dir={tmp_path}")
    lenders = [
        mooncake.StoreConfig(segment_bytes=16 * MIB, name=f"{host}:7014")
        for host in ("localhost", "127.0.0.1")
    ]
    try:
        with mooncake.Store(pool.address, lenders[0]) as store:
            store.put_many({f"k{at}": bytes(100_000) for at in range(20)})
            with mooncake.Store(pool.address, lenders[1]):
                done = on(pool, "drain", "localhost")
        assert (done.returncode, done.stdout.splitlines()[-1]) == (
            0,
            "localhost:7014 holds no object; its process may be stopped",
        )
    finally:
        pool.stop()
