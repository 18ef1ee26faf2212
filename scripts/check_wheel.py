"""Checks a wheel: name, size, dependencies, libraries, imports, and a smoke run on each Python.

Usage: check_wheel.py WHEEL. The wheel is installed, without its dependencies, into a clean
environment of every Python from 3.11 on that this machine has. In each environment the package is
imported, a master is started, an object is put and read, and the interpreter exits while other
threads are in calls. Where the variable CI is "true", the check fails unless CPython 3.11, 3.12 and
3.13 are all there.
"""

from __future__ import annotations

import email
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
BYTES_MAX = 10_000_000
IMPORT_MS_MAX = 60
# The fastest of these runs counts: a busy machine delays a run, and never makes one faster.
IMPORT_RUNS_MIN = 5
IMPORT_RUNS_MAX = 40
READY_SECONDS = 20
READY = re.compile(rb"mooncake_master ready rpc=(\S+)")
PYTHONS_REQUIRED = [(3, 11), (3, 12), (3, 13)]

# Prints how long the import took, in milliseconds.
TIMED_IMPORT = """
import time
start = time.perf_counter()
import mooncake
print((time.perf_counter() - start) * 1000)
"""

# Offers an empty numpy and torch, so that an import of either succeeds and is seen also where
# neither is installed; prints the names of those that were imported.
WATCHED_IMPORT = """
import importlib.machinery, sys, types

class Stub:
    def create_module(self, spec):
        return types.ModuleType(spec.name)
    def exec_module(self, module):
        imported.add(module.__name__)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numpy", "torch"):
            return importlib.machinery.ModuleSpec(name, Stub(), is_package=True)

imported = set()
sys.meta_path.insert(0, Finder())
import mooncake, mooncake.store, mooncake.engine
print(*sorted(imported))
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

# Exits while threads are in calls of the extension. The unwinder of the wheel is not that of the
# development build, whose tests do not see a thread that CPython ends below a Rust frame.
EXIT_DURING_CALLS = """
import threading
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("localhost", "P2PHANDSHAKE", 64 << 20, 1 << 20, "tcp", "", "embedded")
assert code == 0, f"setup gave {code}"
calls = threading.Semaphore(0)
def work(key):
    while True:
        store.upsert(key, bytes(1 << 20)); store.get(key); store.is_exist("absent")
        calls.release()
for number in range(6):
    threading.Thread(target=work, args=(f"key{number}",), daemon=True).start()
for _ in range(20):
    calls.acquire()
"""
EXIT_RUNS = 8


def main() -> None:
    """Check the wheel and report each result; the first failed check ends the program."""
    wheel = Path(sys.argv[1]).resolve()
    check_name_and_size(wheel)
    check_dependencies(wheel)
    check_protocol(wheel)
    pythons = find_pythons()
    check_pythons(set(pythons), is_ci=os.environ.get("CI") == "true")
    with tempfile.TemporaryDirectory(prefix="mooncake-wheel-") as scratch:
        check_library(wheel, Path(scratch))
        for version in sorted(pythons):
            check_in_clean_environment(wheel, pythons[version], Path(scratch))


def check_name_and_size(wheel: Path) -> None:
    """Require the tag of abi3 from 3.11 on with glibc 2.28, and at most `BYTES_MAX` bytes."""
    tag = f"-cp311-abi3-manylinux_2_28_{platform.machine()}.whl"
    require(wheel.name.endswith(tag), f"the name {wheel.name} does not end in {tag}")
    size = wheel.stat().st_size
    require(size <= BYTES_MAX, f"the wheel is too large: bytes={size} limit={BYTES_MAX}")
    report(f"{wheel.name}: {size / 1e6:.1f} MB")


def check_dependencies(wheel: Path) -> None:
    """Require that every dependency belongs to an extra."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(path))
    for dependency in metadata.get_all("Requires-Dist", []):
        _, _, marker = dependency.partition(";")
        # With `or` in the marker the dependency could apply without the extra.
        is_optional = "extra ==" in marker and " or " not in marker
        require(is_optional, f"the wheel has a required dependency: {dependency}")


def check_protocol(wheel: Path) -> None:
    """Require that fsspec finds the protocol `mooncake` in the metadata."""
    with zipfile.ZipFile(wheel) as archive:
        points = "".join(
            archive.read(name).decode()
            for name in archive.namelist()
            if name.endswith(".dist-info/entry_points.txt")
        )
    found = re.search(r"\[fsspec\.specs\]\n(?:\w.*\n)*mooncake *=", points)
    require(found is not None, "the wheel does not register the protocol mooncake with fsspec")


def check_library(wheel: Path, scratch: Path) -> None:
    """Require an extension that needs only glibc, and no symbol newer than glibc 2.28."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".so")]
        require(names == ["mooncake/_native.abi3.so"], f"libraries in the wheel: {names}")
        library = archive.extract(names[0], scratch)
        require("mooncake/py.typed" in archive.namelist(), "the wheel has no py.typed")
    dynamic = output("readelf", "--wide", "--dynamic", library)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    require(bool(needed), "readelf lists no needed library, not even libc")
    for name in needed:
        require(bool(NEEDED_ALLOWED.fullmatch(name)), f"the extension needs {name}")
    require(
        "RPATH" not in dynamic and "RUNPATH" not in dynamic,
        "the extension has a search path",
    )
    symbols = output("readelf", "--wide", "--version-info", library)
    versions = {
        (int(major), int(minor)) for major, minor in re.findall(r"GLIBC_(\d+)\.(\d+)", symbols)
    }
    newest = max(versions)
    require(newest <= GLIBC_MAX, f"the extension needs glibc {newest}")
    report(f"needs {' '.join(needed)}; glibc {newest[0]}.{newest[1]}")


def check_pythons(found: set[tuple[int, int]], *, is_ci: bool) -> None:
    """Report the required versions of Python that are missing; in CI none may be missing."""
    missing = ", ".join(f"3.{minor}" for _, minor in PYTHONS_REQUIRED if (3, minor) not in found)
    require(not (missing and is_ci), f"CI must have every supported Python: missing={missing}")
    if missing:
        report(f"not checked, because not found: Python {missing} (install it with pyenv)")


def check_in_clean_environment(wheel: Path, python: Path, scratch: Path) -> None:
    """Install the wheel alone, import it, start a master, put and get."""
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
    check_imported_modules(program)
    took = check_import_time(program)
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
        require(master.wait(timeout=10) == 0, f"the master ended with {master.returncode}")
    for _ in range(EXIT_RUNS):
        run(str(program), "-c", EXIT_DURING_CALLS)
    report(f"Python {version.strip()}: import takes {took:.0f} ms, put and get of 1 MiB work")


def check_imported_modules(python: Path) -> None:
    """Require that importing the package, its store and its engine loads no numpy and no torch."""
    heavy = output(str(python), "-c", WATCHED_IMPORT).strip()
    require(not heavy, f"importing mooncake also imports {heavy}")


def check_import_time(python: Path) -> float:
    """Require an import in a fresh interpreter within `IMPORT_MS_MAX`; return the best time."""
    best = float("inf")
    for run_number in range(IMPORT_RUNS_MAX):
        if run_number >= IMPORT_RUNS_MIN and best <= IMPORT_MS_MAX:
            break
        best = min(best, float(output(str(python), "-c", TIMED_IMPORT)))
    require(
        best <= IMPORT_MS_MAX,
        f"importing mooncake takes too long: best_ms={best:.0f} limit_ms={IMPORT_MS_MAX}",
    )
    return best


def wait_for_address(master: subprocess.Popen[bytes]) -> str:
    """Return the RPC address from the line that the master prints when it is ready."""
    assert master.stdout is not None
    printed = b""
    deadline = time.monotonic() + READY_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(master.stdout, selectors.EVENT_READ)
        while (found := READY.search(printed)) is None or not printed.endswith(b"\n"):
            left = deadline - time.monotonic()
            require(
                left > 0 and bool(selector.select(left)),
                f"the master is not ready after {READY_SECONDS} s: {printed!r}",
            )
            more = os.read(master.stdout.fileno(), 4096)
            require(bool(more), f"the master ended before it was ready: {printed!r}")
            printed += more
    return found[1].decode()


def find_pythons() -> dict[tuple[int, int], Path]:
    """Return one interpreter of each version from 3.11 on, of pyenv or of the path, or our own."""
    found = {(3, sys.version_info.minor): Path(sys.executable)}
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for minor in range(11, 15):
        candidates = sorted(home.glob(f"versions/3.{minor}.*/bin/python"))
        on_path = shutil.which(f"python3.{minor}")
        if on_path is not None:
            candidates.append(Path(on_path))
        for candidate in candidates:
            # A pyenv shim on the path fails where its version is not switched on.
            probe = [str(candidate), "-c", "import ensurepip, venv"]
            if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
                found.setdefault((3, minor), candidate)
    return found


def run(*command: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True, timeout=120)


def output(*command: str) -> str:
    """Return the output of a command that must succeed."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def require(is_met: bool, error: str) -> None:
    """End the program with the error unless the condition is met."""
    if not is_met:
        sys.exit(f"check_wheel: {error}")


def report(text: str) -> None:
    """Print one line for the reader."""
    print(f"check_wheel: {text}", flush=True)


if __name__ == "__main__":
    main()
