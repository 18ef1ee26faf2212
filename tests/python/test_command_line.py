"""The command line of `mooncake`: the order of words, and standard streams that are closed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import MIB, MasterProcess

import mooncake
from mooncake._command.main import parsed


def fields(*words: str) -> dict[str, object]:
    return {name: value for name, value in vars(parsed(words)).items() if name != "refuse"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("put key --overwrite file", "put --overwrite key file"),
        ("put key --ttl 1h file --tag=a=b", "put --ttl 1h --tag=a=b key file"),
        ("put key -- -file", "put -- key -file"),
        ("put -r a --metadata url b prefix", "put -r --metadata url a b prefix"),
        ("get -r prefix --no-progress folder", "get -r --no-progress prefix folder"),
        ("rm a --force b", "rm --force a b"),
        ("exists a --json b", "exists --json a b"),
        ("expire a b --json 1h", "expire --json a b 1h"),
        ("drain a --evict b --to c", "drain --evict --to c a b"),
        ("explain -704 --json 5", "explain --json -704 5"),
    ],
)
def test_options_may_stand_between_keys_and_files(first, second):
    assert fields(*first.split()) == fields(*second.split())


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("put key --ttl", "argument --ttl: expected one argument"),
        ("put key --ttl -- file", "argument --ttl: expected one argument"),
        ("put key --overwritten file", "did you mean --overwrite?"),
        ("exists --json", "the following arguments are required: key"),
    ],
)
def test_wrong_words_are_named(capsys, words, error):
    with pytest.raises(SystemExit):
        parsed(words.split())
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("job", [f"{1 << 64}-1", "1-" + "9" * 30, "1"])
def test_id_of_a_job_that_is_none_is_refused(capsys, job):
    with pytest.raises(SystemExit):
        parsed(["drain", "--status", job])
    assert f"not the id of a job: {job!r}" in capsys.readouterr().err
    assert parsed(["drain", "--status", f"1-{(1 << 64) - 1}"]).status == (1, (1 << 64) - 1)


# Closed streams


@pytest.fixture(scope="module")
def pool(master: MasterProcess):
    config = mooncake.StoreConfig(segment_bytes=16 * MIB)
    with mooncake.Store(master.address, config) as store:
        store.put("key", b"value", overwrite=True)
        yield master


def run(closed: str, *words: str, **options: str) -> subprocess.CompletedProcess[str]:
    """Run the command with streams closed as a shell does it."""
    script = f'exec "$0" "$@" {closed}'
    return subprocess.run(
        ["sh", "-c", script, sys.executable, "-m", "mooncake", *words],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        **options,
    )


@pytest.mark.parametrize(("key", "code"), [("key", 0), ("absent", 1)])
def test_exists_answers_without_standard_output(pool: MasterProcess, key, code):
    done = run(">&-", "exists", key, f"--master={pool.address}")
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize("words", ["ls", "get key", "stat", "stat key", "segments", "exists key"])
def test_commands_do_without_standard_output(pool: MasterProcess, words):
    done = run(">&-", *words.split(), f"--master={pool.address}")
    assert (done.returncode, done.stderr) == (0, "")


def test_errors_do_not_go_to_standard_output(pool: MasterProcess):
    done = run("2>&-", "stat", "absent", f"--master={pool.address}")
    assert (done.returncode, done.stdout) == (1, "")


def test_put_of_a_closed_standard_input_stores_nothing(pool: MasterProcess):
    done = run("<&-", "put", "other", f"--master={pool.address}")
    assert done.returncode == 1
    assert "Bad file descriptor" in done.stderr
    assert "Traceback" not in done.stderr
    assert run("", "exists", "other", f"--master={pool.address}").returncode == 1


def serves(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("cli", "--rpc_port={} --metrics_port=0 --http_metadata_server_port=0"),
        ("http_metadata_server", "--port={}"),
        ("vllm_v1_proxy_server", "--port={}"),
    ],
)
def test_files_of_a_program_get_no_number_of_a_stream(module, options):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", f"mooncake.{module}", *options.format(port).split()]
    script = 'exec "$0" "$@" <&- >&- 2>&-'
    process = subprocess.Popen(["sh", "-c", script, *words])
    try:
        limit = time.monotonic() + 50
        while not serves(port):
            assert time.monotonic() < limit
            assert process.poll() is None
            time.sleep(0.01)
        links = [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in range(3)]
        assert links == [os.devnull] * 3
    finally:
        process.terminate()
        process.wait(timeout=50)


def test_unexpected_failure_of_exists_is_no_answer(monkeypatch, capsys):
    from mooncake._command import main, objects

    def fail(_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(objects, "exists", fail)
    assert main.main(["exists", "key"]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err
    monkeypatch.setattr(objects, "ls", fail)
    assert main.main(["ls"]) == 1


# Values that are too large


def test_check_names_a_file_that_is_nested_too_deep(tmp_path: Path):
    for text in ("[" * 100_000, '{"a": ' + "[" * 100_000):
        file = tmp_path / "deep.json"
        file.write_text(text)
        done = run("", "check", str(file))
        assert done.returncode != 0
        assert "deep.json has too many values inside one another" in done.stdout + done.stderr


def test_bench_names_a_size_for_which_there_is_no_memory():
    done = run("", "bench", "--master=embedded", "--sizes=1024TB")
    assert done.returncode == 1
    assert "no memory for two values of" in done.stderr
    assert "--sizes" in done.stderr
