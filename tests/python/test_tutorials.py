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
# The tests must not lend gigabytes.
SMALL = {"global_segment_size": "64MB", "local_buffer_size": "16MB"}


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a tutorial in one language, in order."""
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
    """Return the scalars below one key of a tutorial's YAML, without a YAML reader."""
    below = text[text.index(f"{name}:") :].splitlines()[1:]
    indented = [line.split(":", 1) for line in below if line.startswith("  ")]
    return {key.strip(): value.strip().strip('"') for key, value in indented}


def settings_of(page: str) -> dict[str, Any]:
    """Return the settings that a tutorial gives to the program."""
    if page in {"vllm.md", "sglang.md"}:
        settings: dict[str, Any] = json.loads(blocks(page, "json")[0])
        return settings
    name = "extra_config" if page == "lmcache.md" else "  MooncakeStore"
    return yaml_mapping(blocks(page, "yaml")[0], name)


def written(page: str, master: str, folder: Path) -> Path:
    """Return a file with the settings of a tutorial, for this master and with little memory."""
    text = blocks(page, "json" if page in {"vllm.md", "sglang.md"} else "yaml")[0]
    assert "127.0.0.1:50051" in text
    text = text.replace("127.0.0.1:50051", master)
    for name, size in SMALL.items():
        text = re.sub(rf'({name}"?): [^,\n]+', rf'\1: "{size}"', text)
    file = folder / page.replace(".md", ".settings")
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize("page", ["vllm.md", "sglang.md", "lmcache.md", "transfer-queue.md"])
def test_settings_of_a_tutorial_open_a_store(page: str, master: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mooncake", "check", str(written(page, master, tmp_path)), "--try"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"settings of {page.removesuffix('.md')}:"), done.stdout
    assert "a store was opened with these settings, and moved an object" in done.stdout
    assert "ERROR" not in done.stdout
    assert "warning" not in done.stdout.splitlines()[-1], done.stdout


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
