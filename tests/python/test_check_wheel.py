"""`scripts/check_wheel.py` fails on wheels that break what the project promises of its wheel."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/check_wheel.py"
NAME = f"mooncake_transfer_engine-0.0.1-cp311-abi3-manylinux_2_28_{platform.machine()}.whl"
METADATA = "Metadata-Version: 2.4\nName: mooncake-transfer-engine\nVersion: 0.0.1\n"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_wheel", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_wheel(folder: Path, *, dependency: str = "", source: str = "", padding: int = 0) -> Path:
    """Write a wheel of pure Python; `source` is the code of `mooncake.engine`."""
    wheel = folder / NAME
    requires = f"Requires-Dist: {dependency}\n" if dependency else ""
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("mooncake_transfer_engine-0.0.1.dist-info/METADATA", METADATA + requires)
        archive.writestr("mooncake/__init__.py", "")
        archive.writestr("mooncake/store.py", "")
        archive.writestr("mooncake/engine.py", source)
        archive.writestr("mooncake/padding", bytes(padding))
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """Unpack a wheel into a fresh environment and return its interpreter."""
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(next(environment.glob("lib/python3*/site-packages")))
    return environment / "bin/python"


def run_program(wheel: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, wheel], capture_output=True, text=True, timeout=50, check=False
    )


def test_rejects_wheel_above_the_size_limit(script, tmp_path):
    wheel = make_wheel(tmp_path, padding=script.BYTES_MAX)
    done = run_program(wheel)
    assert done.returncode == 1
    assert "too large" in done.stderr
    assert f"limit={script.BYTES_MAX}" in done.stderr
    script.check_name_and_size(make_wheel(tmp_path, padding=script.BYTES_MAX - 10_000))


@pytest.mark.parametrize(
    "dependency",
    [
        "numpy",
        "numpy>=2",
        'numpy ; python_version > "3"',
        'numpy ; extra == "tensor" or python_version > "3"',
    ],
)
def test_rejects_required_dependency(script, tmp_path, dependency):
    done = run_program(make_wheel(tmp_path, dependency=dependency))
    assert done.returncode == 1
    assert f"required dependency: {dependency}" in done.stderr


def test_accepts_dependency_of_an_extra(script, tmp_path):
    for dependency in ("", "numpy ; extra == 'tensor'", 'a>1 ; extra == "b" and os_name == "c"'):
        script.check_dependencies(make_wheel(tmp_path, dependency=dependency))


def test_requires_the_protocol_of_files(script, tmp_path):
    wheel = make_wheel(tmp_path)
    with pytest.raises(SystemExit, match="does not register the protocol mooncake"):
        script.check_protocol(wheel)
    with zipfile.ZipFile(wheel, "a") as archive:
        points = "[console_scripts]\na=b:c\n\n[fsspec.specs]\nmooncake=mooncake.files:F\n"
        archive.writestr("mooncake_transfer_engine-0.0.1.dist-info/entry_points.txt", points)
    script.check_protocol(wheel)


@pytest.mark.parametrize(
    "source",
    [
        "import numpy",
        "import torch.distributed",
        "try:\n    import numpy\nexcept ImportError:\n    pass",
    ],
)
def test_rejects_import_of_numpy_or_torch(script, tmp_path, source):
    python = install(make_wheel(tmp_path, source=source), tmp_path)
    with pytest.raises(SystemExit, match=r"importing mooncake also imports (numpy|torch)"):
        script.check_imported_modules(python)


def test_accepts_search_for_numpy_without_import(script, tmp_path):
    source = "import importlib.util, json\nimportlib.util.find_spec('numpy')"
    script.check_imported_modules(install(make_wheel(tmp_path, source=source), tmp_path))


def test_rejects_slow_import(script, tmp_path, monkeypatch):
    python = install(make_wheel(tmp_path), tmp_path)
    assert script.check_import_time(python) <= script.IMPORT_MS_MAX
    package = next(tmp_path.glob("environment/lib/*/site-packages/mooncake/__init__.py"))
    package.write_text(f"import time; time.sleep({script.IMPORT_MS_MAX / 1000})")
    monkeypatch.setattr(script, "IMPORT_RUNS_MAX", 2)
    with pytest.raises(SystemExit, match=r"takes too long: best_ms=\d+ limit_ms=60"):
        script.check_import_time(python)


def test_rejects_missing_pythons_in_ci_only(script, capsys):
    every = set(script.PYTHONS_REQUIRED)
    script.check_pythons(every, is_ci=True)
    assert capsys.readouterr().out == ""
    script.check_pythons(every - {(3, 12)}, is_ci=False)
    assert "not found: Python 3.12" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"missing=3\.12, 3\.13"):
        script.check_pythons({(3, 11)}, is_ci=True)


def test_finds_the_running_interpreter(script):
    assert script.find_pythons()[sys.version_info[:2]]


@pytest.mark.parametrize("name", ["mooncake-0.0.1-py3-none-any.whl", NAME.replace("_28", "_39")])
def test_rejects_other_platform_tags(script, tmp_path, name):
    wheel = make_wheel(tmp_path)
    os.rename(wheel, tmp_path / name)
    with pytest.raises(SystemExit, match="does not end in"):
        script.check_name_and_size(tmp_path / name)


@pytest.mark.parametrize("code", [0, 3])
def test_output_of_tools_is_shown_if_they_fail(code: int) -> None:
    runner = SCRIPT.with_name("run-quietly.sh")
    command = [str(runner), "building it", "bash", "-c", f"echo of a tool; exit {code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == code
    lines = done.stdout.splitlines()
    if code == 0:
        assert lines[0] == "building it ..."
        assert lines[1].startswith("building it: done in ")
        assert (len(lines), done.stderr) == (2, "")
    else:
        assert lines == ["building it ..."]
        assert done.stderr.splitlines() == ["of a tool", "building it: failed with exit code 3"]
