"""The `mooncake` command: `top` and `bench`, objects, error messages and help."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from typing import Any

import pytest
from conftest import MIB, MasterProcess, start_master

import mooncake
import mooncake._command.main
import mooncake.errors
from mooncake import _native
from mooncake._command import doctor, top as _top
from mooncake._command.parser import commands_of
from mooncake._units import format_bytes, format_count
from mooncake.engine import codes

COMMANDS = ["put", "get", "cp", "ls", "rm", "exists", "stat", "segments", "clients", "drain"]
COMMANDS += ["top", "bench", "doctor", "demo", "env", "explain", "ha", "handover"]


def command(
    *arguments: str | bytes, errors: str = "strict", **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mooncake", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors=errors,
        stdin=subprocess.DEVNULL,
        timeout=50,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.fixture(scope="module")
def busy(master: MasterProcess):
    """A pool with one object, one hit and one miss."""
    with mooncake.Store(master.address, mooncake.StoreConfig(segment_bytes=64 * MIB)) as store:
        store.put("k", bytes(MIB))
        assert store.get("k") == bytes(MIB)
        assert store.get("nope", None) is None
        yield master


def test_top_prints_once_without_a_terminal(busy: MasterProcess):
    done = command("top", f"--master={busy.address}", "--interval=0.2")
    assert (done.returncode, done.stderr) == (0, "")
    assert busy.address in done.stdout
    assert "\033" not in done.stdout
    assert re.search(r"memory +\[.*1 MiB of 64 MiB", done.stdout)
    assert re.search(r"objects +1 ", done.stdout)
    assert "50.0% ever" in done.stdout, "one get of two found its object"
    for title in ("CALL", "SEGMENT", "CLIENT"):
        assert title in done.stdout


def test_top_prints_json(busy: MasterProcess):
    done = command("top", f"--master={busy.address}", "--interval=0.2", "--json")
    seen = json.loads(done.stdout)
    assert seen["pool"]["keys"] == 1
    assert seen["per_second"]["gets"] == 0


def test_top_restores_the_terminal(busy: MasterProcess):
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "mooncake", "top", f"--master={busy.address}"],
        stdin=follower,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    try:
        text = read_until(leader, b"q ends")
        assert b"\033[?1049h" in text
        assert b"SEGMENT" in text
        os.write(leader, b"q")
        assert b"\033[?1049l" in read_until(leader, b"\033[?1049l")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait(10)
        os.close(leader)


def read_until(file: int, end: bytes) -> bytes:
    text, deadline = b"", time.monotonic() + 30
    while end not in text:
        assert time.monotonic() < deadline, text
        if select.select([file], [], [], 1)[0]:
            text += os.read(file, 1 << 16)
    return text


def sample(at: float = 1.0, gets: int = 0, calls: int = 0, **more: Any) -> _top.Sample:
    """A sample of an overview; `more` replaces its fields."""
    zero = {"used": 0, "capacity": 0, "writing": 0, "fenced": 0, "keys": 0}
    call = {"calls": calls, "items": calls * 10, "missed": gets // 2, "failed": 0}
    overview = {
        "version": "1",
        "addresses": {"rpc": "a:1"},
        "uptime_ms": 3 * 86_400_000,
        "pool": {**zero, "soft_pinned_keys": 0, "clients": 0, "segments": 0},
        "reads": {"gets": gets, "hits": gets // 2, "hit_bytes": gets * MIB},
        "evictions": {"keys": 0, "bytes": 0},
        "puts": {"without_room": 0},
        "slow": {"total": 0},
        "calls": [{"name": "get", **call}],
        "segments": [],
        "clients": [],
    }
    return _top.Sample(at, {**overview, **more})


def test_top_shows_rates_per_second():
    lines = _top.render(sample(12.0, 300, 25), sample(10.0, 100, 5), "a:2", 200)
    text = "\n".join(lines)
    assert "reads    100/s, hit rate 50.0% now and 50.0% ever, 100 MiB/s found" in text
    assert re.search(r"get +10 +100 +50 +0 +25 +0", text)
    assert "up 3 d 0 h" in text
    # A restarted master counts from zero, which must not show as a negative rate.
    restarted = _top.render(sample(12.0, 0, 0), sample(10.0, 9, 9), "a:2", 200)
    assert "reads    0/s" in "\n".join(restarted)
    assert all(len(line) <= 20 for line in _top.render(sample(), None, "a:2", 20))


@pytest.mark.parametrize(
    ("host", "state", "is_name_whole"),
    [
        ("127.0.0.1:16537", "OK", True),
        ("192.168.100.123:65535", "DRAINING", True),
        ("kv-cache-store-of-a-long-name-0:65535", "OK", False),
    ],
)
def test_top_fits_eighty_columns(host: str, state: str, is_name_whole: bool):
    address = "192.168.100.123:65535"
    size = {"size": 1000 << 40, "used": 999 << 40, "status": state}
    memory = {"used": 999 << 40, "capacity": 1000 << 40, "writing": 9 << 40, "fenced": 1 << 40}
    counts = {"keys": 10**12, "soft_pinned_keys": 10**9, "clients": 10**4, "segments": 10**4}
    seen = sample(
        addresses={"rpc": "192.168.100.100:50051"},
        pool=memory | counts,
        segments=[{"name": host, "endpoint": address, **size}],
        clients=[{"name": host, "heard_ms_ago": 3000}],
    )
    narrow = _top.render(seen, None, "192.168.100.100:9003", 80)
    assert max(map(len, narrow)) <= 80
    text = "\n".join(narrow)
    assert "9 TiB being written, 1 TiB fenced" in text
    [head] = [line for line in narrow if line.startswith("SEGMENT")]
    row = narrow[narrow.index(head) + 1]
    assert (row.split()[-2:], head.endswith("  AT")) == ([state, address], True)
    assert (host in row) == is_name_whole


def test_top_shows_an_address_that_can_be_reached():
    seen = sample(addresses={"rpc": "0.0.0.0:50051"})
    assert "master m.example:50051 " in _top.render(seen, None, "m.example:9003", 80)[0]
    assert "master ? " in _top.render(sample(addresses={}), None, "m:9003", 80)[0]


def test_top_says_that_an_embedded_pool_has_no_admin_port(store: mooncake.Store):
    done = command("top", f"--master={store.master_address}", "--once")
    assert (done.returncode, done.stdout) == (1, "")
    [text, hint] = done.stderr.splitlines()
    assert text == f"mooncake: the master at {store.master_address} has no admin port"
    assert "mooncake_master with --metrics_port; the pool that a Store starts has no" in hint


def test_top_fails_without_a_master(busy: MasterProcess):
    assert command("top", "--master=127.0.0.1:1").returncode == 1
    wrong = command("top", f"--admin={busy.metadata}")
    assert (wrong.returncode, "404" in wrong.stderr) == (1, True)
    assert command("top", f"--master={busy.address}", "--interval=0").returncode == 2


@pytest.mark.parametrize("where", [[], ["--master=embedded"]])
def test_bench_measures_against_memcpy(where):
    done = command("bench", "--sizes=4kb,1mb", "--seconds=0.05", *where)
    assert (done.returncode, done.stderr) == (0, "")
    rows = re.findall(r"(4 KiB|1 MiB) (copy|put|get_into|get) ", done.stdout)
    assert len(rows) == 8
    assert ("memory" if where else "shm") in done.stdout.splitlines()[0]


def test_bench_prints_json_and_leaves_no_objects(busy: MasterProcess):
    to = f"--master={busy.address}"
    done = command("bench", to, "--sizes=64kb", "--seconds=0.05", "--json")
    report = json.loads(done.stdout)
    assert [row["operation"] for row in report["rows"]] == ["copy", "put", "get_into", "get"]
    for row in report["rows"]:
        assert row["bytes_per_second"] > 0
        assert 0 < row["p50_us"] <= row["p99_us"]
    with mooncake.Store(busy.address) as store:
        assert list(store.keys()) == ["k"]
    assert command("bench", to, "--sizes=0").returncode == 2


def test_amounts_are_formatted_for_people():
    assert [format_bytes(n) for n in (0, 1023, 1024, 1536, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 KiB",
        "5 TiB",
    ]
    assert format_bytes((1 << 30) - 40) == "1 GiB", "not 1024.0 MiB"
    shown = [format_count(n) for n in (0, 7, 9999, 12_345, 2_500_000)]
    assert shown == ["0", "7", "9999", "12.3k", "2.5M"]


def test_commands_accept_any_key(master: MasterProcess, tmp_path):
    given, got = tmp_path / "given", tmp_path / "got"
    given.write_bytes(b"bytes")
    keys: list[str | bytes] = ["shell/grüße", b"shell/\xff"]
    at = f"--master={master.address}"
    with mooncake.Store(master.address, mooncake.StoreConfig(segment_bytes=64 * MIB)) as store:
        for key in keys:
            assert command("put", at, key, str(given)).returncode == 0
            again = command("put", at, key, "/proc/self/comm")
            assert (again.returncode, "exists and was kept" in again.stderr) == (1, True)
            assert command("get", at, key, str(got)).returncode == 0
            assert got.read_bytes() == b"bytes" == store.get(key)
        # Also with a terminal encoding that has no such characters.
        listed = command("ls", at, b"shell/", errors="surrogateescape", PYTHONIOENCODING="ascii")
        lines = [line.split() for line in os.fsencode(listed.stdout).splitlines()]
        keys_listed = ["shell/grüße".encode(), b"shell/\xff"]
        assert lines == [[b"5", b"B", b"x1", key] for key in keys_listed]
        assert command("ls", at, "shell/none").stdout == ""

        assert command("rm", at, "--force", *keys).returncode == 0
        assert store.exists_many(keys) == [False, False]


def test_rm_continues_past_a_leased_object():
    master = start_master("--default_kv_lease_ttl=600s")
    at = f"--master={master.address}"
    try:
        with mooncake.Store(master.address, mooncake.StoreConfig(segment_bytes=64 * MIB)) as store:
            store.put_many({"used": b"1", "unused": b"2"})
            store.lease("used").renew()
            removed = command("rm", at, "used", "none", "unused")
            assert (removed.returncode, removed.stdout) == (1, "")
            used, none, hint = removed.stderr.splitlines()
            assert ("used" in used, "none" in none) == (True, True)
            assert re.match("  hint: .*lease", hint)
            assert store.exists_many(["used", "unused"]) == [True, False]
            assert command("rm", at, "--force", "used").returncode == 0
            assert not store.exists("used")
    finally:
        master.stop()


_TRANSPORTS_OF_A_GET = """
import sys
from mooncake import Store
with Store(sys.argv[1]) as store:
    store.get("k")
    counts = store.stats()["store"]["by_transport"]
    print(*[name for name in counts if counts[name]["bytes"]])
"""


@pytest.mark.parametrize("value", ["off", " No ", "0", "F", "disable", "1", "on", "", "maybe"])
def test_doctor_reads_mc_force_tcp_as_the_store(
    busy: MasterProcess, value: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MC_FORCE_TCP", value)
    line = [sys.executable, "-c", _TRANSPORTS_OF_A_GET, busy.address]
    served = subprocess.run(line, capture_output=True, text=True, timeout=50, check=True).stdout
    choice = doctor.diagnose(lambda _: "works")["choice"]["same host"]
    assert choice.partition(":")[0].partition(",")[0] == served.strip()


def test_doctor_says_what_is_wrong_with_a_value(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MC_FORCE_TCP", "maybe")
    monkeypatch.setenv("MC_LOG_LEVEL", "INFO")
    shown = doctor.diagnose(lambda _: "works")["environment"]
    assert shown["MC_FORCE_TCP"].startswith("maybe (from MC_FORCE_TCP; invalid: ")
    assert shown["MC_LOG_LEVEL"] == "INFO"


def test_empty_master_variable_is_ignored():
    done = command("stat", MOONCAKE_MASTER="")
    assert "the address has no host" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["get", "k"],
        ["put", "k", "/dev/null"],
        ["put", "k", "/nowhere/at/all"],
        ["ls"],
        ["rm", "k"],
        ["stat"],
        ["top", "--once"],
        ["top", "--admin=127.0.0.1:1", "--once"],
        ["bench"],
        ["stat", "k"],
        ["exists", "k"],
        ["cp", "k", "to"],
        ["segments"],
        ["clients"],
        ["drain", "localhost"],
    ],
)
def test_failures_print_message_and_hint(words):
    name, *rest = words
    done = command(name, "--master=127.0.0.1:1", *rest)
    # For `exists` 1 is an answer.
    assert (done.returncode, done.stdout) == (2 if name == "exists" else 1, "")
    assert done.stderr.startswith("mooncake: ")
    has_code = not {"/nowhere/at/all", "--admin=127.0.0.1:1"} & set(words)
    assert bool(re.search(r" \(-\d+ [A-Z_]+\)$", done.stderr.splitlines()[0])) == has_code
    assert "Traceback" not in done.stderr
    assert "[Errno " not in done.stderr
    _, *hint = done.stderr.splitlines()
    assert len(hint) <= 1
    assert all(line.startswith("  hint: ") for line in hint)


@pytest.mark.parametrize(
    "words",
    [
        ["top", "--interval=nan"],
        ["bench", "--seconds=nan"],
        ["bench", "--sizes=0"],
        ["bench", "--sizes=many"],
        ["ls", "--limit=0"],
        ["exists", "k", "--quiet", "--json"],
        ["drain"],
        ["drain", "--status=x"],
        ["completion", "tcsh"],
    ],
)
def test_wrong_usage_exits_with_two(words):
    done = command(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "mooncake: " in done.stderr


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["gett", "k"], "get"),
        (["put", "--overwrit", "k", "f"], "--overwrite"),
        (["ls", "--delimit=/"], "--delimiter"),
        (["--masters", "localhost:1", "ls"], "--master"),
        (["--masters"], "--master"),
    ],
)
def test_misspelled_words_get_a_suggestion(words, meant):
    done = command(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"; did you mean {meant}?\n")


@pytest.mark.parametrize("words", [["--master", "localhost:1", "ls"], ["--json", "stat"]])
def test_options_follow_the_command(words):
    done = command(*words)
    assert done.returncode == 2
    assert f"{words[0]} stands before the command: options follow it" in done.stderr


@pytest.mark.parametrize(
    "words", [["put", "-dash", "file"], ["rm", "-dash"], ["cp", "-dash", "to"]], ids=" ".join
)
def test_key_that_begins_with_a_dash_gets_a_hint(words):
    done = command(*words)
    assert (done.returncode, done.stdout) == (2, "")
    hint = "; a key that begins with - follows --, as in `-- -dash`"
    assert done.stderr.splitlines()[-1].endswith(hint)
    assert "follows --" not in command("put").stderr


def test_env_lists_no_variable_of_tests():
    name = "MOONCAKE_TEST_CHAOS_SECONDS"
    assert name not in command("env").stdout
    assert f"{name} = 7 " in command("env", **{name: "7"}).stdout


def test_unknown_command_names_the_help():
    for words in (["nope"], ["help", "nope"]):
        done = command(*words)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.endswith("; `mooncake help` tells what each does\n")


def test_demo_prints_json():
    seen = json.loads(command("demo", "--json").stdout)
    assert (seen["get"]["bytes"], seen["get"]["transports"]) == (64 * MIB, ["shm"])
    assert seen["keys"] == ["from-child", "from-parent"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_commands_and_options(shell):
    done = command("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    for word in (*COMMANDS, "recursive"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["mooncake", "seg"], "segments"),
        (["mooncake", "rm", "--dry"], "--dry-run"),
        (["mooncake", "rm", "--delim"], ""),
        (["mooncake", "ls", "--delim"], "--delimiter"),
    ],
)
def test_bash_completes_commands_and_options(words, offered):
    script = command("completion", "bash").stdout
    line = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}"
    text = f'{script}\n{line}; _mooncake; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == offered


def test_module_is_the_command():
    words = [sys.executable, "-m", "mooncake", "help", "ls"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == command("ls", "--help").stdout


@pytest.mark.parametrize("name", ["put", "get", "rm", "explain"])
def test_invalid_command_line_prints_usage(name):
    for words in ([name], [name, "k", "--nonsense"], ["nonsense"]):
        done = command(*words)
        assert (done.returncode, done.stdout) == (2, "")
        usage = f"usage: mooncake {'' if words == ['nonsense'] else f'{name} '}["
        assert done.stderr.startswith(usage)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_text(name):
    done = command(name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: mooncake {name}")
    assert name in command("--help").stdout


def test_every_argument_has_a_help_text():
    for parser in commands_of(mooncake._command.main._parser()).values():
        for action in parser._actions:
            assert action.help, (parser.prog, action.dest)


def test_explain_describes_every_code():
    done = command("explain", "-704", "0", "-12345")
    missing, success, unknown = done.stdout.splitlines()
    assert missing.startswith("-704 OBJECT_NOT_FOUND (mooncake.store, NotFoundError): No obj")
    assert (success, unknown) == ("0: success", "-12345: unknown code")
    assert done.returncode == 1, "one code is unknown"
    positive = command("explain", "704").stdout
    assert positive.splitlines() == [missing], "the sign may have been lost"
    done = command("explain", "4096")
    text = "4096: unknown code; a call that returns a number above 0 has succeeded\n"
    assert (done.returncode, done.stdout) == (1, text)
    assert "did you mean OBJECT_NOT_FOUND" in command("explain", "OBJECT_NOT_FOND").stdout
    done = command("explain", "object_not_found")
    assert (done.returncode, done.stdout) == (0, missing + "\n")
    store, engine = _native.codes(), _native.codes(is_engine=True)
    for number, name, _, remedy in [*store, *engine]:
        [line] = mooncake.errors.explain(name).splitlines()
        assert line in mooncake.errors.explain(number).splitlines()
        assert line.startswith(f"{number} {name} (")
        assert line.endswith(remedy)


def test_explain_takes_names_of_exceptions():
    done = command("explain", "NoSpaceError")
    codes = [row for row in _native.codes() if row[2] == "NoSpace"]
    assert done.returncode == 0
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        [str(number), name] for number, name, *_ in codes
    ]
    assert mooncake.errors.explain("nospaceerror") == done.stdout.rstrip("\n")
    done = command("explain", "NoSpacError")
    assert (done.returncode, done.stdout) == (
        1,
        "NoSpacError: unknown code; did you mean NoSpaceError?\n",
    )


def test_explain_separates_engine_and_store_codes():
    of_store, of_engine = command("explain", "-102").stdout.splitlines()
    assert of_store.startswith("-102 SEGMENT_ALREADY_EXISTS (mooncake.store, AlreadyExistsError)")
    assert of_engine.startswith("-102 ERR_SOCKET (mooncake.engine): From `send_probe`")
    [overlap] = command("explain", "-7").stdout.splitlines()
    assert "register_memory" in overlap
    known = {number for number, *_ in _native.codes(is_engine=True)}
    failures = {value for name, value in vars(codes).items() if name in codes.__all__ and value < 0}
    assert failures - {codes.NOT_SUPPORTED} <= known, "every code of the adapter is explained"
