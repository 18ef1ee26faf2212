"""Settings in the tutorials open a store; the tutorial of two processes runs as it is printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "docs/tutorials"
READY = re.compile(r"mooncake_master ready rpc=(\S+)")
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


def check_settings(folder: Path, *arguments: str, **variables: str) -> None:
    """Runs the program of the page that tries settings, as it is printed."""
    program = folder / "check_settings.py"
    program.write_text(blocks("../how-to/check-settings.md", "text")[0], encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, str(program), *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("the settings work: MooncakeConfig(")


@pytest.mark.parametrize("page", ["vllm.md", "sglang.md", "lmcache.md", "transfer-queue.md"])
def test_settings_of_a_tutorial_open_a_store(page: str, master: str, tmp_path: Path) -> None:
    settings = settings_of(page)
    assert settings["master_server_address"] == "127.0.0.1:50051"
    file = tmp_path / "settings.json"
    file.write_text(
        json.dumps(settings | {"master_server_address": master} | SMALL), encoding="utf-8"
    )
    check_settings(tmp_path, str(file))


def test_settings_of_the_environment_open_a_store(master: str, tmp_path: Path) -> None:
    check_settings(
        tmp_path,
        MOONCAKE_MASTER=master,
        MOONCAKE_GLOBAL_SEGMENT_SIZE="64mb",
        MOONCAKE_LOCAL_BUFFER_SIZE="16mb",
    )


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
    assert "greeting" in gone.stderr
