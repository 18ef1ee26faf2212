"""Settings in the tutorials open a store; the tutorial of two processes runs as it is printed."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mooncake

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "docs/tutorials"
READY = re.compile(r"mooncake_master ready rpc=(\S+)")
DAEMON_READY = re.compile(r"mooncake_client ready rpc=(\S+)")
# The tests must not lend gigabytes.
SMALL = {"global_segment_size": "64MB", "local_buffer_size": "16MB"}


def blocks(page: str, language: str) -> list[str]:
    """Returns the code blocks of a tutorial in one language, in order."""
    text = (TUTORIALS / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    """A master as the tutorials start it, on a free port."""
    flags = ["--rpc_port=0", "--metrics_port=0", "--state_dir=none", "--rpc_address=127.0.0.1"]
    command = [sys.executable, "-m", "mooncake.cli", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = READY.search(process.stdout.readline())
        assert ready is not None
        yield ready.group(1)
        process.terminate()


def yaml_mapping(text: str, name: str) -> dict[str, str]:
    """Returns the scalars below one key of a tutorial's YAML, without a YAML reader."""
    below = text[text.index(f"{name}:") :].splitlines()[1:]
    indented = [line.split(":", 1) for line in below if line.startswith("  ")]
    return {key.strip(): value.strip().strip('"') for key, value in indented}


def settings_of(page: str) -> dict[str, Any]:
    """Returns the settings that a tutorial gives to the program."""
    if page in {"vllm.md", "sglang.md"}:
        settings: dict[str, Any] = json.loads(blocks(page, "json")[0])
        return settings
    name = "extra_config" if page == "lmcache.md" else "  MooncakeStore"
    return yaml_mapping(blocks(page, "yaml")[0], name)


def run_check(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the program of the page that tries settings, as it is printed."""
    program = folder / "check_settings.py"
    if not program.exists():
        program.write_text(blocks("../how-to/check-settings.md", "text")[0], encoding="utf-8")
    return subprocess.run(
        [sys.executable, str(program), *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def check_settings(folder: Path, *arguments: str, **variables: str) -> list[str]:
    """Returns the warnings of the program that tries settings, which must succeed."""
    ended = run_check(folder, *arguments, **variables)
    assert ended.returncode == 0, ended.stderr
    *warnings, last = ended.stdout.splitlines()
    assert re.match(r"the settings work: (MooncakeConfig\(|daemon )", last)
    return warnings


def write_settings(folder: Path, **settings: str) -> str:
    """Returns the path of a file with the settings of the page about vLLM and those given."""
    file = folder / "settings.json"
    file.write_text(json.dumps(settings_of("vllm.md") | SMALL | settings), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("page", ["vllm.md", "sglang.md", "lmcache.md", "transfer-queue.md"])
def test_settings_of_a_tutorial_open_a_store(page: str, master: str, tmp_path: Path) -> None:
    settings = settings_of(page)
    assert settings["master_server_address"] == "127.0.0.1:50051"
    file = tmp_path / "settings.json"
    file.write_text(
        json.dumps(settings | {"master_server_address": master} | SMALL), encoding="utf-8"
    )
    own = {"lmcache.md": "transfer_timeout", "transfer-queue.md": "auto_init"}
    expected = [f"warning: a store has no setting {own[page]}"] if page in own else []
    warnings = check_settings(tmp_path, str(file))
    assert [line.partition(";")[0] for line in warnings] == expected


def test_misspelled_setting_is_named(master: str, tmp_path: Path) -> None:
    file = write_settings(tmp_path, master_server_address=master, protocols="tcp")
    warnings = check_settings(tmp_path, file)
    assert warnings == ["warning: a store has no setting protocols; is protocol meant?"]


def test_check_of_settings_warns_of_a_loopback_address(master: str, tmp_path: Path) -> None:
    program = blocks("../how-to/check-settings.md", "text")[0]
    # The master of the test is on loopback, too.
    condition = "not is_loopback(host_of(config.master_server_address))"
    assert condition in program
    (tmp_path / "check_settings.py").write_text(program.replace(condition, "True"), "utf-8")
    file = write_settings(tmp_path, master_server_address=master, local_hostname="localhost")
    published = "warning: this process publishes localhost: other hosts cannot read what it lends."
    assert check_settings(tmp_path, file)[0] == published


def test_failed_check_of_settings_says_which_step(master: str, tmp_path: Path) -> None:
    missing = run_check(tmp_path, str(tmp_path / "none.json"))
    absent = run_check(tmp_path, write_settings(tmp_path, master_server_address="127.0.0.1:1"))
    lends_nothing = run_check(
        tmp_path, write_settings(tmp_path, master_server_address=master, global_segment_size="0")
    )
    ended = (missing, absent, lends_nothing)
    last = [each.stderr.splitlines()[-1] for each in ended]
    assert [each.returncode for each in ended] == [1, 1, 1]
    assert last[0].startswith("the settings cannot be read: ")
    assert last[1].startswith("setup failed with -600: no connection to the master")
    assert "check that it runs at the address" in last[1], "what to do"
    assert last[2].startswith("put failed with -200: ")
    assert re.search(r" \(Lend a segment .*\)$", last[2]), "what to do"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "the settings cannot be read: .*settings.json has no JSON object"),
        (
            '{"master_server_address": 50051}',
            'the settings cannot be read: .* is text, as "HOST:50051", not 50051',
        ),
        (
            '{"master_server_address": "nowhere.invalid:50051"}',
            r"the host nowhere\.invalid cannot be reached: .*Correct master_server_address\.\)",
        ),
        (
            '{"master_server_address": "127.0.0.1:1"}',
            ".*Missing required config field: metadata_server; P2PHANDSHAKE needs no server",
        ),
    ],
)
def test_check_of_settings_names_what_is_wrong(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(text, encoding="utf-8")
    ended = run_check(tmp_path, str(tmp_path / "settings.json"))
    assert ended.returncode == 1
    [line] = ended.stderr.splitlines()
    assert re.fullmatch(reason, line)


def test_check_of_settings_joins_a_daemon(master: str, tmp_path: Path) -> None:
    flags = ["--host=127.0.0.1", "--port=0", "--global_segment_size=64MB"]
    flags += [f"--master_server_address={master}", "--metadata_server=P2PHANDSHAKE"]
    command = [sys.executable, "-m", "mooncake.cli_client", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = DAEMON_READY.search(process.stdout.readline())
        assert ready is not None
        variables = {"MOONCAKE_STANDALONE_STORAGE": "1", "MOONCAKE_CLIENT": ready.group(1)}
        assert check_settings(tmp_path, **variables) == []
        # The same from a file, whose settings of a daemon are known.
        daemon = {"standalone_storage": "1", "client_server_address": ready.group(1)}
        assert check_settings(tmp_path, write_settings(tmp_path, **daemon)) == []
        process.terminate()


def test_settings_of_the_environment_open_a_store(master: str, tmp_path: Path) -> None:
    warnings = check_settings(
        tmp_path,
        MOONCAKE_MASTER=master,
        MOONCAKE_GLOBAL_SEGMENT_SIZE="64mb",
        MOONCAKE_LOCAL_BUFFER_SIZE="16mb",
        MOONCAKE_DEVICE='{"0": "mlx5_0"}',
    )
    assert warnings == []


def test_transfer_queue_starts_no_second_master() -> None:
    # By default TransferQueue kills the master that the page has started, and starts its own.
    assert settings_of("transfer-queue.md")["auto_init"] == "false"


@pytest.mark.parametrize("page", ["vllm.md", "sglang.md", "lmcache.md", "transfer-queue.md"])
def test_tutorial_installs_the_wheel_of_this_package(page: str) -> None:
    installs = [line for block in blocks(page, "bash") for line in block.splitlines()]
    assert [line for line in installs if re.match(r"pip install .*dist/\S*\.whl", line)] != []


def test_program_of_embedded_tutorial_prints_a_command(tmp_path: Path) -> None:
    program = tmp_path / "pool.py"
    program.write_text(blocks("embedded.md", "text")[0], encoding="utf-8")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, str(program)], **pipes) as process:  # type: ignore[call-overload]
        command = process.stdout.readline().split()
        assert command[:3] == ["mooncake", "ls", "--master"]
        listing = subprocess.run(
            [sys.executable, "-m", "mooncake", *command[1:]],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert "prompt/1" in listing.stdout
        process.communicate("\n", timeout=60)
        assert process.returncode == 0


def test_two_processes_run_as_printed(master: str, tmp_path: Path) -> None:
    sources = [
        block.replace("localhost:50051", master) for block in blocks("two-processes.md", "text")
    ]
    lender, reader = (tmp_path / name for name in ("lender.py", "reader.py"))
    lender.write_text(sources[0].replace('"1GB"', '"64MB"'), encoding="utf-8")
    reader.write_text(sources[1], encoding="utf-8")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, str(lender)], **pipes) as process:  # type: ignore[call-overload]
        # The prompt comes when the object is stored.
        prompt = "press Enter to leave the pool"
        assert os.read(process.stdout.fileno(), len(prompt)).decode() == prompt
        read = subprocess.run(
            [sys.executable, str(reader)], capture_output=True, text=True, timeout=60, check=False
        )
        assert (read.stdout, read.stderr, read.returncode) == ("hello from the lender\n", "", 0)
        process.communicate("\n", timeout=60)
        assert process.returncode == 0
    gone = subprocess.run(
        [sys.executable, str(reader)], capture_output=True, text=True, timeout=60, check=False
    )
    assert gone.returncode == 1
    assert blocks("two-processes.md", "text")[2].strip() in gone.stderr.splitlines()


def test_two_hosts_store_two_copies_as_printed(master: str, tmp_path: Path) -> None:
    program = tmp_path / "important.py"
    source = blocks("two-hosts.md", "text")[-1]
    program.write_text(source.replace("10.0.0.1:50051", master), encoding="utf-8")
    config = mooncake.StoreConfig(segment_bytes="64MB")
    with mooncake.Store(master, config) as one, mooncake.Store(master, config) as two:
        names = {one.name, two.name}
        ended = subprocess.run(
            [sys.executable, str(program)], capture_output=True, text=True, timeout=60, check=True
        )
        one.delete("important", force=True)
    assert set(ast.literal_eval(ended.stdout)) == names


def test_only_the_first_run_of_important_warns_of_one_copy(master: str, tmp_path: Path) -> None:
    program = tmp_path / "important.py"
    source = blocks("two-hosts.md", "text")[-1]
    program.write_text(source.replace("10.0.0.1:50051", master), encoding="utf-8")
    with mooncake.Store(master, mooncake.StoreConfig(segment_bytes="64MB")) as lender:
        runs = [
            subprocess.run(
                [sys.executable, str(program)],
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
            for _ in range(2)
        ]
        lender.delete("important", force=True)
    assert "fewer copies than asked" in runs[0].stderr
    assert (runs[1].stdout, runs[1].stderr) == (f"{[lender.name]}\n", "")


@pytest.mark.parametrize(
    ("page", "setting"),
    [
        ("sglang.md", "MOONCAKE_LOCAL_HOSTNAME"),
        ("lmcache.md", "local_hostname"),
        ("vllm.md", "VLLM_HOST_IP"),
    ],
)
def test_tutorial_names_the_address_for_several_hosts(page: str, setting: str) -> None:
    text = (TUTORIALS / page).read_text(encoding="utf-8")
    assert setting in text.partition("### On more than one host\n")[2].partition("\n## ")[0]


def test_yaml_for_several_hosts_changes_known_settings() -> None:
    first, several = (yaml_mapping(text, "extra_config") for text in blocks("lmcache.md", "yaml"))
    assert several.keys() <= first.keys()
    assert several["master_server_address"] != several["local_hostname"] != "localhost"
