"""Proves that a wheel is what we promise: what it needs, how big it is, and that it works alone.

Usage: check_wheel.py WHEEL. The wheel is installed, without its dependencies, into a clean
environment of every Python from 3.11 on that this machine has; each imports it, starts a master,
and puts and gets an object.
"""

from __future__ import annotations

import os
import platform
import re
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

NEEDED_ALLOWED = re.compile(
    r"lib(c|m|gcc_s|pthread|dl|rt)\.so\.\d+|ld-linux-(x86-64|aarch64)\.so\.\d+"
)
GLIBC_MAX = (2, 28)
BYTES_MAX = 15 * 1024 * 1024
IMPORT_MS_MAX = 100
READY_SECONDS = 20
READY = re.compile(rb"mooncake_master ready rpc=(\S+)")

IMPORT = """
import sys, time
start = time.perf_counter()
import mooncake
took = time.perf_counter() - start
heavy = {"numpy", "torch"} & set(sys.modules)
assert not heavy, f"importing mooncake also imported {heavy}"
print(took * 1000)
"""

PUT_AND_GET = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("localhost", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", sys.argv[1])
assert code == 0, f"setup gave {code}"
value = bytes(range(256)) * 4096
assert store.put("key", value) == 0
assert store.get("key") == value
store.close()
"""


def main() -> None:
    """Checks the wheel and says what it found; the first thing that is wrong ends it."""
    wheel = Path(sys.argv[1]).resolve()
    check_name_and_size(wheel)
    with tempfile.TemporaryDirectory(prefix="mooncake-wheel-") as scratch:
        check_library(wheel, Path(scratch))
        for python in pythons():
            check_in_clean_environment(wheel, python, Path(scratch))


def check_name_and_size(wheel: Path) -> None:
    """The tag says abi3 from 3.11 on and glibc 2.28; the size is bounded."""
    tag = f"-cp311-abi3-manylinux_2_28_{platform.machine()}.whl"
    demand(wheel.name.endswith(tag), f"{wheel.name} does not end in {tag}")
    size = wheel.stat().st_size
    demand(size < BYTES_MAX, f"{wheel.name} has {size} bytes, more than {BYTES_MAX}")
    say(f"{wheel.name}: {size / 1e6:.1f} MB")


def check_library(wheel: Path, scratch: Path) -> None:
    """The extension needs nothing but glibc, and no newer symbol of it than 2.28."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".so")]
        demand(names == ["mooncake/_native.abi3.so"], f"libraries in the wheel: {names}")
        library = archive.extract(names[0], scratch)
        demand("mooncake/py.typed" in archive.namelist(), "the wheel has no py.typed")
    dynamic = output("readelf", "--wide", "--dynamic", library)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    demand(bool(needed), "the extension needs no library at all, which cannot be")
    for name in needed:
        demand(bool(NEEDED_ALLOWED.fullmatch(name)), f"the extension needs {name}")
    demand(
        "RPATH" not in dynamic and "RUNPATH" not in dynamic,
        "the extension has a search path",
    )
    symbols = output("readelf", "--wide", "--version-info", library)
    versions = {
        (int(major), int(minor)) for major, minor in re.findall(r"GLIBC_(\d+)\.(\d+)", symbols)
    }
    newest = max(versions)
    demand(newest <= GLIBC_MAX, f"the extension needs glibc {newest}")
    say(f"needs {' '.join(needed)}; glibc {newest[0]}.{newest[1]}")


def check_in_clean_environment(wheel: Path, python: Path, scratch: Path) -> None:
    """Installs the wheel alone, imports it, starts a master, puts and gets."""
    version = output(str(python), "-c", "import sys; print('%d.%d.%d' % sys.version_info[:3])")
    environment = scratch / version.strip()
    run(str(python), "-m", "venv", str(environment))
    program = environment / "bin" / "python"
    pip = [
        str(program),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
    ]
    run(*pip, "--no-index", "--no-deps", str(wheel))
    took = min(float(output(str(program), "-c", IMPORT)) for _ in range(5))
    demand(took < IMPORT_MS_MAX, f"importing took {took:.0f} ms, more than {IMPORT_MS_MAX}")
    run(str(environment / "bin" / "mooncake_client"), "--version")
    command = [
        str(environment / "bin" / "mooncake_master"),
        "--rpc_port=0",
        "--metrics_port=0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as master:
        try:
            run(str(program), "-c", PUT_AND_GET, wait_for_address(master))
        finally:
            master.terminate()
        demand(master.wait(timeout=10) == 0, f"the master ended with {master.returncode}")
    say(f"Python {version.strip()}: imported in {took:.0f} ms, put and got 1 MiB through a master")


def wait_for_address(master: subprocess.Popen[bytes]) -> str:
    """Reads what the master says until it says where it listens."""
    assert master.stdout is not None
    said = b""
    deadline = time.monotonic() + READY_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(master.stdout, selectors.EVENT_READ)
        while (found := READY.search(said)) is None or not said.endswith(b"\n"):
            left = deadline - time.monotonic()
            demand(
                left > 0 and bool(selector.select(left)),
                f"the master is silent: {said!r}",
            )
            more = os.read(master.stdout.fileno(), 4096)
            demand(bool(more), f"the master ended before it was ready: {said!r}")
            said += more
    return found[1].decode()


def pythons() -> list[Path]:
    """One interpreter of each version from 3.11 on, of pyenv or of the path; at least our own."""
    found = {sys.version_info[:2]: Path(sys.executable)}
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for minor in range(11, 15):
        candidates = sorted(home.glob(f"versions/3.{minor}.*/bin/python"))
        on_path = shutil.which(f"python3.{minor}")
        if on_path is not None:
            candidates.append(Path(on_path))
        for candidate in candidates:
            # A shim on the path may stand for a version that is not switched on.
            probe = [str(candidate), "-c", "import ensurepip, venv"]
            if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
                found.setdefault((3, minor), candidate)
    return [found[version] for version in sorted(found)]


def run(*command: str) -> None:
    """Runs a command that must succeed."""
    subprocess.run(command, check=True, timeout=120)


def output(*command: str) -> str:
    """What a command that must succeed prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def demand(is_met: bool, complaint: str) -> None:
    """Ends the program with the complaint unless the demand is met."""
    if not is_met:
        sys.exit(f"check_wheel: {complaint}")


def say(text: str) -> None:
    """One line for the reader."""
    print(f"check_wheel: {text}", flush=True)


if __name__ == "__main__":
    main()
