"""The site lists every page, its links have targets, and the names in it exist."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from upstream_package import PACKAGE

import mooncake
from mooncake._command.main import _parser

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    path for path in DOCS.rglob("*.md") if not {"_build", "_extensions"} & set(path.parts)
)
# `make docs` writes them from a running pool.
WRITTEN_BY_BUILD = {"reference/metrics.md", "reference/http-paths.md"}
# Pages that instruct; decisions and the change log also name what was refused or is gone.
INSTRUCTIONS = [
    ROOT / "README.md",
    *(page for page in PAGES if page.parent.name in {"tutorials", "how-to", "guide"}),
]
# Programs of others, whose options are not checked.
FOREIGN_PROGRAM = re.compile(
    r"\b(?:curl|docker|kubectl|pip|sysctl|systemctl|useradd|torchrun|vllm(?:\.\w+)*"
    r"|sglang(?:_router)?\.\w+)\s"
)
# Options of others that stand alone.
FOREIGN_FLAGS = {
    *("--cap-add", "--device", "--ipc", "--ulimit"),
    *("--kv-transfer-config", "--tensor-parallel-size", "--pipeline-parallel-size"),
    *("--block-size", "--num-gpu-blocks-override"),
    "--env-file",
    *("--disable-hybrid-kv-cache-manager", "--hicache-storage-backend-extra-config"),
    *("--disaggregation-ib-device", "--base-gpu-id", "--max-restarts"),
}
FOREIGN_VARIABLES = {
    "MOONCAKE_CHECK_SERVER",
    "MOONCAKE_CLIENT",
    "MOONCAKE_ENABLE_SSD_OFFLOAD",
    "MOONCAKE_STANDALONE_STORAGE",
}
FOREIGN_VARIABLES |= {"VLLM_MOONCAKE_BOOTSTRAP_PORT"}
PROGRAMS = (
    "mooncake.mooncake_store_service",
    "mooncake.http_metadata_server",
    "mooncake.vllm_v1_proxy_server",
    "mooncake.env",
)


def without_code(text: str) -> str:
    """Return a page without its code blocks, whose brackets are no links."""
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)


def code_of(text: str) -> list[str]:
    """Return the code blocks and the code within lines of a page."""
    return re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE) + re.findall(
        r"`([^`\n]+)`", without_code(text)
    )


def anchors(page: Path) -> set[str]:
    """Return the names of a page's headings as links spell them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_is_in_a_table_of_contents() -> None:
    listed = {DOCS / "index.md"}
    for page in PAGES:
        for tree in re.findall(r":::\{toctree\}\n(.*?):::", page.read_text("utf-8"), re.DOTALL):
            for entry in re.findall(r"^(?!:)(\S+)$", tree, re.MULTILINE):
                pages = set(page.parent.glob(f"{entry}.md"))
                name = f"{entry}.md"
                assert pages or name in WRITTEN_BY_BUILD, f"{page.name} lists {entry}"
                listed |= pages
    assert [str(page.relative_to(DOCS)) for page in PAGES if page not in listed] == []


def test_links_between_pages_have_targets() -> None:
    # Readers of the repository have no page that only `make docs` writes.
    broken = []
    for page in [ROOT / "README.md", *PAGES]:
        links = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8")))
        for link in links:
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if "://" in link:
                continue
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_readers_find_limits_and_dashboards_from_the_start() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "(docs/limits.md)" in readme[: readme.index("## Install")]
    assert "(deploy/README.md)" in readme
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert "(limits.md)" in index
    assert "(guide/operating.md#dashboards-and-alerts)" in index


@pytest.mark.parametrize(
    ("row", "file", "constant", "value"),
    [
        ("length of a key | 64 KiB", "base/src/key.rs", "KEY_BYTES_MAX", "64 * 1024"),
        ("copies of an object | 128", "master/src/state/catalog/object.rs", "REPLICAS_MAX", "128"),
        ("tags of an object | 32", "master/src/state/tags.rs", "TAGS_MAX", "32"),
        ("tenants | 65,536", "master/src/state/catalog/object.rs", "TENANTS_MAX", "1 << 16"),
        ("key at a time | 64", "master/src/state/calls/put.rs", "WRITERS_PER_KEY_MAX", "64"),
        ("up to 8,192", "store-client/src/rpc/batch.rs", "ITEMS_MAX", "8192"),
        ("over gRPC | 131,072", "proto/src/decode_limits.rs", "ITEMS_MAX", "1 << 17"),
        ("to the master | 16 MiB", "proto/src/native_frame.rs", "FRAME_BYTES_MAX", "16 << 20"),
        ("keys | 16 KiB", "master/src/state/calls/query.rs", "PATTERN_BYTES_MAX", "16 * 1024"),
        (
            "clients of a master | 65,536",
            "master/src/state/inventory/clients.rs",
            "CLIENTS_MAX",
            "65_536",
        ),
        ("drains | 64", "master/src/state/calls/task/drain.rs", "RUNNING_MAX", "64"),
        ("events of objects | 64", "master/src/events.rs", "SUBSCRIBERS_MAX", "64"),
        ("slow calls | 128", "master/src/service/slow_log.rs", "KEPT_MAX", "128"),
        ("web page | 1 h", "master/src/admin/history.rs", "SAMPLES_MAX", "1800"),
    ],
)
def test_limits_are_those_of_the_code(row: str, file: str, constant: str, value: str) -> None:
    assert row in (DOCS / "limits.md").read_text(encoding="utf-8")
    code = (ROOT / "crates" / file).read_text(encoding="utf-8")
    found = re.search(rf"const {constant}: \w+ = (.*);", code)
    assert found is not None
    assert found[1].removesuffix(" as usize") == value


def test_metadata_of_the_wheel_names_no_other_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert not [url for url in project.get("urls", {}).values() if "kvcache-ai" in url]


@cache
def known_flags() -> frozenset[str]:
    """Return the options of all programs of the package, with `_` for `-`."""
    flags = set(re.findall(r"--[a-z][\w-]*", "".join(map(help_of, PROGRAMS))))
    parsers: list[argparse.ArgumentParser] = [_parser()]
    while parsers:
        for action in parsers.pop()._actions:
            flags |= set(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    for page in ("options-master.md", "options-client.md"):
        text = (DOCS / "reference" / page).read_text(encoding="utf-8")
        flags |= {f"--{name}" for name in re.findall(r"`-*(\w+)`", text)}
    return frozenset(flag.replace("-", "_") for flag in flags)


@cache
def defaults_of_master() -> dict[str, str]:
    """Return the default of each option in the generated reference."""
    text = (DOCS / "reference/options-master.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `(\w+)`[^|]* \| `([^`]*)` \|", text, re.MULTILINE))


def wrong_numbers(text: str) -> list[str]:
    """Return each option of a page that a number in brackets follows which is not its default."""
    found = re.findall(r"`--(\w+)`\s(?:given\s)?\((\d+(?:\.\d+)?)( m?s\b)?", text)
    defaults = defaults_of_master()
    # Durations are milliseconds or seconds in the reference.
    factors = {"": (1.0,), " ms": (1.0,), " s": (1.0, 1000.0)}
    return [
        f"{name} {number}{unit}"
        for name, number, unit in found
        if name in defaults
        and float(defaults[name]) not in {float(number) * factor for factor in factors[unit]}
    ]


@pytest.mark.parametrize("page", INSTRUCTIONS, ids=lambda page: page.stem)
def test_numbers_behind_options_are_their_defaults(page: Path) -> None:
    assert wrong_numbers(page.read_text(encoding="utf-8")) == []


def test_numbers_behind_options_are_compared() -> None:
    text = "`--eviction_ratio` (0.05), `--eviction_high_watermark_ratio` (0.95 of the memory)"
    assert wrong_numbers(text) == ["eviction_high_watermark_ratio 0.95"]


def help_of(module: str) -> str:
    """Return what a program prints about its options."""
    command = [sys.executable, "-m", module, "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return ended.stdout


@pytest.mark.parametrize("page", INSTRUCTIONS, ids=lambda page: page.stem)
def test_options_and_variables_in_a_page_exist(page: Path) -> None:
    code = "\n".join(code_of(page.read_text(encoding="utf-8")))
    lines = code.replace("\\\n", " ").splitlines()
    ours = "\n".join(line for line in lines if not FOREIGN_PROGRAM.search(line))
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", ours)) - FOREIGN_FLAGS
    assert {flag for flag in flags if flag.replace("-", "_") not in known_flags()} == set()
    listed = (DOCS / "reference/environment.md").read_text(encoding="utf-8")
    variables = set(re.findall(r"\b(?:MC|MOONCAKE|VLLM_MOONCAKE)_[A-Z0-9_]*[A-Z0-9]\b", code))
    known = set(re.findall(r"\w+", listed)) | FOREIGN_VARIABLES
    assert variables - known == set()


def shown_secrets(text: str) -> list[str]:
    """Return the commands with a secret among their arguments, which other users of a host see."""
    code = "\n".join(code_of(text)).replace("\\\n", " ")
    # The shell gives variables and what its own `printf` prints to no other process.
    unquoted = re.sub(r"'[^']*'", "", code)
    secret = r"\S*TOKEN=\S*\$\("
    return re.findall(rf"^.*(?:\benv|--from-literal|--admin_token)[ =]{secret}.*$", unquoted, re.M)


@pytest.mark.parametrize("page", INSTRUCTIONS, ids=lambda page: page.stem)
def test_page_passes_no_secret_as_an_argument(page: Path) -> None:
    assert shown_secrets(page.read_text(encoding="utf-8")) == []


def test_secrets_in_arguments_are_found() -> None:
    text = '```bash\nrunuser -u x -- env A_TOKEN="$(cat f)" \\\n    mooncake_master\n```\n'
    assert len(shown_secrets(text)) == 1
    text = "```bash\nrunuser -u x -- sh -c 'A_TOKEN=\"$(cat f)\" exec mooncake_master'\n```\n"
    assert shown_secrets(text) == []


@pytest.mark.parametrize("page", INSTRUCTIONS, ids=lambda page: page.stem)
def test_keywords_of_settings_in_a_page_exist(page: Path) -> None:
    classes = {name: getattr(mooncake, name) for name in ("StoreConfig", "PutOptions", "Store")}
    wrong = []
    for code in code_of(page.read_text(encoding="utf-8")):
        for call in re.findall(r"mooncake\.(?:StoreConfig|PutOptions|Store)\([^()]*\)", code):
            node = ast.parse(call, mode="eval").body
            assert isinstance(node, ast.Call)
            assert isinstance(node.func, ast.Attribute)
            known = inspect.signature(classes[node.func.attr]).parameters
            wrong += [call for keyword in node.keywords if keyword.arg not in known]
    assert wrong == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_page_installs_no_package_of_upstream(page: Path) -> None:
    # The name on the public index is upstream's; only a path to the wheel is this package. The
    # name with "-non-cuda" is asked for where upstream's package is meant.
    code = "\n".join(code_of(page.read_text(encoding="utf-8"))).replace("\\\n", " ")
    installs = re.findall(r"\bpip install .*", code)
    name = re.compile(r"mooncake-transfer-engine(?!-non-cuda==)")
    assert [line for line in installs if name.search(line)] == []


def test_extra_for_vllm_has_the_releases_of_its_section() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (DOCS / "guide/vllm.md").read_text(encoding="utf-8")
    first, last = re.findall(r"^## vLLM 0\.(\d+) to 0\.(\d+)$", page, re.MULTILINE)[0]
    wanted = f"vllm>=0.{first},<0.{int(last) + 1}"
    assert wanted in project["optional-dependencies"]["vllm"]
    assert f"`{wanted}`" in page


def test_benchmarks_name_the_version_of_upstream() -> None:
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert f"pip install --no-deps {PACKAGE}" in text
    assert set(re.findall(r"mooncake-transfer-engine-non-cuda\S*?(?=[`\s])", text)) == {PACKAGE}


def test_each_comparison_has_its_command() -> None:
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    compares = re.compile(r"^\| (?:upstream|.*speed ratio)", re.MULTILINE)
    sections = [each for each in text.split("\n## ")[1:] if compares.search(each)]
    assert len(sections) == 4
    named = {each.splitlines()[0]: "--upstream UPSTREAM_VENV" in each for each in sections}
    assert [title for title, is_named in named.items() if not is_named] == []
    programs = set(re.findall(r"python (benches/programs/\w+\.py)", text))
    assert {name for name in programs if not (ROOT / name).is_file()} == set()


@cache
def documented_names() -> frozenset[str]:
    """Return the names of the reference pages of Python, with the members that autodoc adds."""
    names: set[str] = set()
    for page in ("python.md", "python-upstream.md"):
        text = (DOCS / "reference" / page).read_text(encoding="utf-8")
        directives = re.findall(r"^\.\. auto(\w+):: (\S+)\n((?: +:.*\n)*)", text, re.MULTILINE)
        for kind, name, options in directives:
            module, _, last = name.rpartition(".")
            owner = importlib.import_module(name if kind == "module" else module)
            shown = owner if kind == "module" else getattr(owner, last)
            assert inspect.getdoc(shown), f"{name} has no docstring"
            names.add(name)
            if ":members:" in options:
                members = dir(shown) if ":inherited-members:" in options else vars(shown)
                names |= {f"{name}.{member}" for member in members}
    return frozenset(names)


@pytest.mark.parametrize(
    "name",
    [
        "mooncake.Store.put",
        "mooncake.AsyncStore.put",
        "mooncake.store.MooncakeDistributedStore.put",
        "mooncake.store.MooncakeDistributedStore.batch_get_into",
        "mooncake.store.MooncakeDistributedStore.put_tensor",
        "mooncake.store.ReplicateConfig",
        "mooncake.async_store.MooncakeDistributedStoreAsync.get",
        "mooncake.engine.TransferEngine.transfer_sync_write",
        "mooncake.engine.TransferEngine.register_memory",
        "mooncake.structured_object_store.MooncakeBundleTransfer.put_structured_object",
        "mooncake.mooncake_config.MooncakeConfig.load_from_env",
        "mooncake.mooncake_connector_v1.zmq_ctx",
    ],
)
def test_reference_has_names_of_both_apis(name: str) -> None:
    assert name in documented_names()


def rust_constants(source: str) -> dict[str, str]:
    """Return the constants of a Rust file: numbers evaluated, byte strings as they are written."""
    # Lengths that other files declare.
    values: dict[str, str] = {"NONCE_BYTES": "32", "PROOF_BYTES": "32"}
    for name, given in re.findall(r"const (\w+): [^=]+ = (.+);", source):
        text = re.match(r'\*b"(.*)"$', given)
        # Operators and other constants.
        words = re.sub(r"\b[A-Z]\w+", lambda found: values.get(found[0], "?"), given)
        if text is not None:
            values[name] = text[1]
        elif re.fullmatch(r"[\dA-Fa-fx_<+ ]+", words):
            values[name] = str(eval(words, {"__builtins__": {}}))
    return values


def table_rows(text: str) -> dict[str, str]:
    """Return the first two cells of each row of a page whose first cell is code."""
    return dict(re.findall(r"^\| `(\w+)` \| `?(.+?)`? \|", text, re.MULTILINE))


def test_constants_of_frames_are_those_of_the_code() -> None:
    text = (DOCS / "reference/frames.md").read_text(encoding="utf-8")
    sources = 0
    for table in re.findall(r"Source: `(\S+\.rs)`\.\n\n\| Constant .*\n((?:\|.*\n)+)", text):
        source = (ROOT / table[0]).read_text(encoding="utf-8")
        rows = table_rows(table[1])
        assert rows != {}
        code = rust_constants(source)
        assert rows == {name: code.get(name) for name in rows}, table[0]
        sources += 1
    assert sources == 7


@pytest.mark.parametrize(
    ("message", "file"),
    [
        ("ServerGreeting", "native_frame.rs"),
        ("DaemonGreeting", "native_frame.rs"),
        ("ClientProof", "native_token.rs"),
        ("FromStandby", "standby.rs"),
        ("Attach", "standby.rs"),
        ("ViewStart", "standby.rs"),
        ("Confirm", "standby.rs"),
        ("FromLeader", "standby.rs"),
        ("Attached", "standby.rs"),
        ("SnapshotPart", "standby.rs"),
        ("Frames", "standby.rs"),
        ("Leases", "standby.rs"),
        ("RecordCall", "records.rs"),
        ("LoadRecords", "records.rs"),
        ("ReleaseRecords", "records.rs"),
        ("RecordAnswer", "records.rs"),
        ("RecordsLoaded", "records.rs"),
        ("RecordsReleased", "records.rs"),
    ],
)
def test_fields_of_messages_are_those_of_the_code(message: str, file: str) -> None:
    text = (DOCS / "reference/frames.md").read_text(encoding="utf-8")
    source = (ROOT / "crates/proto/src" / file).read_text(encoding="utf-8")
    body = source.partition(f"pub struct {message} {{")[2].partition("\n}")[0]
    fields = re.findall(r'tag = "(\d+)"\)\]\n +pub (\w+):', body)
    table = text.partition(f"| Field of `{message}` |")[2].partition("\n\n")[0]
    assert table_rows(table) == {name: tag for tag, name in fields}


def test_first_bytes_of_connections_are_those_of_the_code() -> None:
    text = (DOCS / "reference/frames.md").read_text(encoding="utf-8")
    source = (ROOT / "crates/master/src/service/listen.rs").read_text(encoding="utf-8")
    protocols = ROOT / "crates/proto/src"
    code = re.findall(r'\(b"(.+?)", Protocol::', source)
    for file in ("native_frame.rs", "standby.rs"):
        code.append(rust_constants((protocols / file).read_text(encoding="utf-8"))["MAGIC"])
    table = text.partition("| First bytes | Protocol |\n|---|---|\n")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()]
    assert sorted(re.findall(r"`(.+?)`", " ".join(cells))) == sorted(code)


def test_fields_of_calls_for_blocks_are_those_of_the_code() -> None:
    text = (DOCS / "reference/frames.md").read_text(encoding="utf-8")
    source = (ROOT / "python/mooncake/_connector/messages.py").read_text(encoding="utf-8")
    struct = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    fields = [node.target.id for node in struct.body if isinstance(node, ast.AnnAssign)]
    table = text.partition("| Field of `MooncakeAgentMetadata` |")[2].partition("\n\n")[0]
    assert list(table_rows(table)) == fields


def reference_pages() -> Any:
    """Return the module that writes reference pages while the site is built."""
    path = DOCS / "_extensions/reference_pages.py"
    spec = importlib.util.spec_from_file_location("reference_pages", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("server", "route"),
    {
        "The master's admin port": "| `/metrics` | GET |",
        "The metadata server of the master": "| `/metadata` | ANY |",
        "The HTTP server of a client or daemon": "| `/health` | GET |",
        "The REST server": "| `/objects/{key}` | PUT | Store an object",
        "The REST server, upstream's routes": "| `/api/get/{key}` | GET |",
        "The proxy for prefill and decode servers": "| `/v1/completions` | POST |",
        "The program mooncake_http_metadata_server": "| `/metadata?key=…` | DELETE, GET, PUT |",
    }.items(),
)
def test_reference_has_paths_of_each_server(server: str, route: str) -> None:
    page = reference_pages().routes_page()
    section = page.partition(f"## {server}\n")[2].partition("\n## ")[0]
    assert f"\n{route}" in section


def test_lines_of_rust_guide_are_from_a_program() -> None:
    program = (ROOT / "tests/outside/src/main.rs").read_text(encoding="utf-8")
    guide = (DOCS / "guide/rust.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```rust\n(.*?)```", guide, re.DOTALL)
    assert len(snippets) == 2
    for snippet in snippets:
        wanted = "".join(line.strip() for line in snippet.splitlines())
        assert wanted in "".join(line.strip() for line in program.splitlines())
