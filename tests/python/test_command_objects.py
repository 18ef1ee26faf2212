"""The `mooncake` command on objects and segments: listings, removals, files, terminals, drains."""

from __future__ import annotations

import json
import os
import pty
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import MIB, MasterProcess, start_master
from test_commands import command, read_until

import mooncake
from mooncake._command.output import quoted


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
    leader, follower = pty.openpty()
    line = [sys.executable, "-m", "mooncake", name, f"--master={pool.address}", *words]
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
        {"prefix": "kv/b/", "objects": 2, "bytes": 8000, "memory_bytes": 8000},
        {"prefix": "kv/a/", "objects": 3, "bytes": 3000, "memory_bytes": 3000},
    ]
    shown = [line.split() for line in on(pool, "ls", "kv/", "--delimiter=/").stdout.splitlines()]
    assert [line[-1] for line in shown] == ["kv/a/", "kv/b/"]


def test_ls_names_the_largest_object(pool: MasterProcess):
    done = on(pool, "ls", "kv/", "--sort=memory", "--limit=1", "--bytes")
    assert done.stdout.split() == ["4000", "x1", "kv/b/0"]
    assert "more follow" in done.stderr
    assert on(pool, "ls", "kv/a", "--keys").stdout.split() == ["kv/a/0", "kv/a/1", "kv/a/2"]


def test_ls_counts(pool: MasterProcess):
    assert on(pool, "ls", "kv/a", "--count", "--bytes").stdout.startswith("3 objects, 3000;")
    found = json.loads(on(pool, "ls", "none/", "--count", "--json").stdout)
    assert found == {"objects": 0, "bytes": 0, "memory_bytes": 0}
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
        store.get("old/2")
        would = on(pool, "rm", "-r", "old/", "--dry-run").stdout.splitlines()
        assert would == [f"would remove old/{at}" for at in range(4)]
        assert store.exists("old/0"), "a dry run removes nothing"
        done = on(pool, "rm", "-r", "old/")
        assert (done.returncode, done.stdout) == (1, "removed 3 objects\n")
        assert 'key="old/2"' in done.stderr, "it is leased"
        assert on(pool, "rm", "-r", "--force", "old/").stdout == "removed 1 objects\n"
        star = on(pool, "rm", "kv/*")
        assert (star.returncode, "--recursive" in star.stderr) == (1, True)
        assert sum(1 for _ in store.keys("kv/")) == 5


def test_rm_asks_on_a_terminal(pool: MasterProcess):
    with mooncake.Store(pool.address) as store:
        store.put_many({"ask/1": b"x", "ask/2": b"y"})
        shown = on_terminal(pool, "rm", "-r", "ask/", typed=b"n\n")
        assert f"remove 2 objects (2 B) under ask/ in the pool of {pool.address}?" in shown.decode()
        assert store.exists_many(["ask/1", "ask/2"]) == [True, True]
        on_terminal(pool, "rm", "-r", "ask/", typed=b"y\n")
        assert store.exists_many(["ask/1", "ask/2"]) == [False, False]


def test_stat_shows_copies_leases_and_pins(pool: MasterProcess):
    seen = json.loads(on(pool, "stat", "pinned", "--json").stdout)
    assert (seen["bytes"], seen["is_hard_pinned"], seen["lease_left_ms"]) == (1, True, 0)
    assert [copy["segment"] for copy in seen["copies"]] == ["localhost:7001"]
    with mooncake.Store(pool.address) as store:
        store.get("kv/a/0")
    text = on(pool, "stat", "kv/a/0").stdout
    assert "s left; not evicted" in text
    assert "copy      localhost:7001  at " in text
    none = on(pool, "stat", "none")
    assert (none.returncode, none.stdout) == (1, "")
    assert none.stderr == "mooncake: no object has the key none\n"


def test_stat_says_why_puts_fail():
    """A pool full of leased objects shows that leases hold its memory."""
    master = start_master("--default_kv_lease_ttl=600s")
    lends = mooncake.StoreConfig(segment_bytes=16 * MIB)
    try:
        with mooncake.Store(master.address, lends) as store:
            for at in range(4):
                store.put(f"k{at}", bytes(4 * MIB))
                store.get(f"k{at}")
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


def test_large_objects_are_read_in_pieces(pool: MasterProcess, tmp_path):
    value = os.urandom(MIB) * 5
    given, got = tmp_path / "given", tmp_path / "got"
    given.write_bytes(value)
    assert on(pool, "put", "large", str(given)).returncode == 0
    script = (
        "import sys; from mooncake._command import files; files._WHOLE_BYTES = 1 << 20;"
        "files._CHUNK_BYTES = 3 << 20; from mooncake._command.main import main;"
        f"sys.exit(main(['get', '--master={pool.address}', 'large', {str(got)!r}]))"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=50)
    assert got.read_bytes() == value
    with mooncake.Store(pool.address) as store:
        store.delete("large", force=True)


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


def test_exists_answers_by_exit_code(pool: MasterProcess):
    assert on(pool, "exists", "pinned", "-q").returncode == 0
    done = on(pool, "exists", "pinned", "none")
    assert (done.returncode, done.stdout) == (1, "yes  pinned\nno   none\n")


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
            store.close()
            assert other.get("k9") == bytes(1000)
            wrong = on(pool, "drain", "127.0.0.1:7013")
            assert (wrong.returncode, wrong.stdout) == (1, "")
            assert "Did you mean 127.0.0.1:7012?" in wrong.stderr


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
