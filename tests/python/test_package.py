"""The package as a whole: import, names, types, the table of error codes, and logs."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import vllm_interface
from conftest import assert_quiet, run_script

import mooncake
from mooncake import _native, errors

ALLOWED = Path(__file__).parent / "stubtest-allowlist.txt"
MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(mooncake.__path__, "mooncake.")
    if not found.name.startswith("mooncake._native")
)


# Modules whose import costs milliseconds. `scripts/check_wheel.py` measures the import of a wheel.
SLOW_MODULES = {"asyncio", "http", "numpy", "socket", "ssl", "subprocess", "torch", "urllib"}


@pytest.mark.parametrize(
    ("module", "slow"),
    [
        ("mooncake", SLOW_MODULES | {"ctypes", "dataclasses", "inspect", "json", "logging"}),
        ("mooncake.store", SLOW_MODULES),
        ("mooncake._api.store", (SLOW_MODULES - {"urllib"}) | {"secrets"}),
    ],
)
def test_import_loads_no_slow_module(module, slow):
    done = run_script(f"import sys, {module}; print(*sys.modules)")
    assert_quiet(done)
    loaded = done.stdout.split()
    assert module in loaded
    assert slow.isdisjoint(loaded)


@pytest.mark.parametrize(
    ("words", "others"),
    [
        (["ls", "--help"], {"mooncake._command.check", "mooncake._command.doctor"}),
        (["explain", "-704"], {"mooncake._command.objects", "mooncake._api.store"}),
    ],
)
def test_command_loads_no_slow_module_and_none_of_others(words, others):
    source = """
import contextlib, sys
from mooncake._command.main import main
with contextlib.suppress(SystemExit):
    main()
print(*sys.modules)
"""
    done = run_script(source, *words)
    assert_quiet(done)
    loaded = done.stdout.splitlines()[-1].split()
    assert "mooncake._command.main" in loaded
    assert ((SLOW_MODULES - {"subprocess", "urllib"}) | others).isdisjoint(loaded)


def test_package_needs_only_the_standard_library():
    source = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "mooncake"}:
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Blocker())
import mooncake.store, mooncake.async_store, mooncake.cli, mooncake._command.main
import mooncake.reshard.weight, mooncake.dataproto_catalog, mooncake.vllm_v1_proxy_server
import mooncake.mooncake_config, mooncake.mooncake_connector_v1
with mooncake.Store() as store:
    store.put("k", b"v")
    assert store.get("k") == b"v"
store = mooncake.store.MooncakeDistributedStore()
assert store.setup("localhost", "P2PHANDSHAKE", master_server_addr="embedded") == 0
assert store.put("k", bytearray(b"v")) == 0
assert sys.modules.keys().isdisjoint({"numpy", "torch"})
"""
    assert_quiet(run_script(source))


# Callers compare these lists with upstream's, whose order they have.
UPSTREAM_ORDER = {
    "mooncake.reshard",
    "mooncake.reshard.contracts",
    "mooncake.reshard.weight",
    "mooncake.reshard.weight.manifest",
    "mooncake.reshard.weight.planner",
}


@pytest.mark.parametrize("name", ["mooncake", *MODULES])
def test_public_names_are_sorted_and_exist(name):
    if "connector" in name:
        vllm_interface.install()
    module = importlib.import_module(name)
    assert module.__doc__
    public = module.__all__
    assert name in UPSTREAM_ORDER or public == sorted(public, key=isort_key)
    for each in public:
        assert getattr(module, each) is not None


def isort_key(name: str) -> tuple[int, str]:
    """Sort constants first, then classes, then the rest."""
    if name.isupper() and len(name) > 1:
        return (0, name)
    return (1, name) if name[:1].isupper() else (2, name)


def test_lazy_names_are_listed():
    assert set(mooncake.__all__) <= set(dir(mooncake))
    for module in (mooncake, mooncake.store):
        own = {name for name in dir(module) if not name.startswith("_")}
        modules = {name for name in own if f"{module.__name__}.{name}" in sys.modules}
        assert own - modules == {name for name in module.__all__ if not name.startswith("_")}
    assert not {"base", "codes", "annotations"} & set(dir(mooncake.store))
    with pytest.raises(AttributeError, match="nonsense"):
        mooncake.nonsense  # noqa: B018


def test_version_matches_the_distribution():
    from importlib.metadata import version

    assert mooncake.__version__ == version("mooncake-transfer-engine")


def test_error_kinds_and_classes_correspond():
    kinds = {kind for _, _, kind, _ in _native.codes()} | {"Closed"}
    assert kinds == set(errors.CLASSES)
    named = [getattr(errors, name) for name in errors.__all__]
    classes = {each for each in named if isinstance(each, type)} - {errors.MooncakeError}
    own = {errors.LeaseLostError, errors.ShardedTensorError, errors.VersionDiffersError}
    assert classes == {*errors.CLASSES.values()} | own
    assert len(classes) == len(errors.CLASSES) + len(own)


def test_every_code_maps_to_its_exception():
    for number, name, kind, remedy in _native.codes():
        error = _native.failure(number, "what happened", key="k")
        assert type(error) is errors.CLASSES[kind]
        is_named = name == "INVALID_PARAMS"  # by the message, which says what is wrong
        expected = (number, name, "" if is_named else remedy)
        assert (error.code, error.code_name, error.remedy) == expected
        assert (str(error), error.key) == ('what happened key="k"', "k")
        assert error.context == {"key": "k"}
        assert str(mooncake.last_error()) == 'what happened key="k"'


def test_failure_has_the_values_of_its_context():
    error = _native.failure(-200, "too large", context={"bytes": 7, "segment": "a:1"})
    assert str(error) == "too large bytes=7 segment=a:1"
    assert error.context == {"bytes": "7", "segment": "a:1"}


def test_reference_page_lists_every_code():
    page = Path(__file__).parents[2] / "docs/reference/error-codes.md"
    rows = re.findall(
        r"^\| (-\d+) \| `(\w+)` \| `(\w+)` \| `(\w+)` \| (.+) \|$", page.read_text(), re.M
    )
    listed = [(int(number), name, kind) for number, name, kind, _, _ in rows]
    known = [(number, name, kind) for number, name, kind, _ in _native.codes()]
    # Codes that nothing returns are a group at the end.
    assert sorted(listed) == sorted(known)
    for _, _, kind, exception, _ in rows:
        assert errors.CLASSES[kind].__name__ == exception


def test_docstring_shows_the_exception_tree():
    drawn = re.findall(r"^[├└]──\s(\w+)(?: \((\w+)\))?", errors.__doc__ or "", re.MULTILINE)
    # No code has this class of its own: a lease is lost by a renewal that failed with any code.
    drawn.remove(("LeaseLostError", ""))
    for (name, second), each in zip(drawn, errors.CLASSES.values(), strict=True):
        assert name == each.__name__
        bases = [base.__name__ for base in each.__bases__]
        assert bases == ["MooncakeError", *([second] if second else [])]


def test_adapter_codes_match_the_table():
    from mooncake.store import codes

    table = {name: number for number, name, _, _ in _native.codes()}
    for name in codes.__all__:
        assert getattr(codes, name) == table.get(name, 0), name


def test_environment_variables_are_documented():
    for name, _, _, help_text, _ in _native.environment():
        assert name.startswith(("MC_", "MOONCAKE_", "VLLM_MOONCAKE_")) or name in {
            "HOME",
            "XDG_STATE_HOME",
            "POD_NAME",
            "POD_NAMESPACE",
        }
        assert help_text


@pytest.mark.timeout(300)
def test_type_hints_pass_mypy_and_stubtest():
    for command in (
        ["mypy", "--no-error-summary"],
        [
            "mypy.stubtest",
            "mooncake._native",
            # Without it stubtest reads all of torch.
            "--mypy-config-file",
            "pyproject.toml",
            "--allowlist",
            str(ALLOWED),
            "--ignore-unused-allowlist",
        ],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *command], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_logs_go_to_python_on_request():
    source = """
import logging, time
records = []
class Keep(logging.Handler):
    def emit(self, record): records.append((record.levelno, record.name, record.getMessage()))
logging.getLogger("there").addHandler(Keep())
logging.getLogger("there").setLevel(1)
import mooncake
mooncake.log_to_python("there")
mooncake.log_to_python("there")
with mooncake.Store() as store:
    store.put("k", b"v")
deadline = time.monotonic() + 10
while not any(level <= logging.DEBUG for level, _, _ in records):
    assert time.monotonic() < deadline, records
    time.sleep(0.01)
assert all(name.startswith("there.") and text for _, name, text in records), records
"""
    assert_quiet(run_script(source, env={"MOONCAKE_LOG": "trace"}))


def test_logs_go_to_stderr_by_default():
    source = "import mooncake\nwith mooncake.Store(): pass"
    loud = run_script(source, env={"MC_LOG_LEVEL": "TRACE"})
    assert "TRACE" in loud.stderr
    assert_quiet(run_script(source, env={"MC_LOG_LEVEL": "1"}))


def test_open_and_close_wait_for_no_periodic_task():
    def lifetime() -> float:
        begin = time.monotonic()
        mooncake.Store().close()
        return time.monotonic() - begin

    # Periodic tasks run once a second; a loaded machine may delay some of the stores.
    assert any(lifetime() < 1.0 for _ in range(30))
