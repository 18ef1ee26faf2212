"""Reference pages written from the code while the site is built: metrics, HTTP paths."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.request import urlopen

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
HEAD = "<!-- Written while the site is built, from the code. -->\n\n"
TYPE = re.compile(r"^# TYPE (\S+) (\S+)$", re.MULTILINE)
HELP = re.compile(r"^# HELP (\S+) (.*)$", re.MULTILINE)
ROUTE = re.compile(r'\.route\(\s*"([^"]+)",\s*([^\n]*(?:\n[^\n.]*)?)')
METHODS = re.compile(r"\b(get|post|put|delete|any)\(")

# Servers in Rust, whose routes are read from the source.
RUST_SERVERS = {
    "The master's admin port": ("master/src/admin.rs", "master/src/admin/jobs.rs"),
    "The metadata server of the master": ("master/src/admin/metadata.rs",),
    "The HTTP server of a client or daemon": ("store-client/src/http.rs",),
}


def metrics_table(text: str) -> str:
    """Return the metrics of one page of Prometheus text, those without effect last."""
    kinds, helps = dict(TYPE.findall(text)), dict(HELP.findall(text))
    head = ["| Metric | Kind | Meaning |", "|---|---|---|"]
    used, unused = [], []
    for name, kind in sorted(kinds.items()):
        meaning = helps.get(name, "").replace("|", "\\|")
        if meaning.startswith("Always zero"):
            unused.append(f"`{name}`")
        else:
            used.append(f"| `{name}` | {kind} | {meaning} |")
    lines = [*head, *used, ""]
    if unused:
        lines += ["Upstream's metrics of features that are not here are always zero:", ""]
        lines += [", ".join(unused) + ".", ""]
    return "\n".join(lines)


def metrics_page() -> str:
    """Ask a running pool for its metrics."""
    import mooncake

    flags = ["--rpc_port=0", "--metrics_port=0", "--rpc_address=127.0.0.1", "--state_dir=none"]
    command = [sys.executable, "-m", "mooncake.cli", *flags]
    paths = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=paths) as process:
        assert process.stdout is not None
        ready = dict(
            word.split("=", 1) for word in process.stdout.readline().split() if "=" in word
        )
        config = mooncake.StoreConfig(segment_bytes="64MB")
        with mooncake.Store(ready["rpc"], config=config) as store:
            store.put("k", b"value")
            store.get("k")
            client = store.metrics_text()
            with urlopen(f"http://{ready['admin']}/metrics") as page:
                master = page.read().decode()
        process.terminate()
    return (
        f"# Metrics\n\n{HEAD}## Of the master\n\n`/metrics` of the admin port.\n\n"
        f"{metrics_table(master)}\n## Of a client\n\n"
        "`Store.metrics_text()`, and `/metrics` of the client's HTTP server. The counters of a\n"
        f"call appear with the first call.\n\n{metrics_table(client)}"
    )


class Route(NamedTuple):
    """A path of a server."""

    path: str
    methods: set[str]
    meaning: str = ""


def routes_table(title: str, routes: Iterable[Route]) -> list[str]:
    """Return the section of a server; the column of meanings is there if a route has one."""
    rows = sorted(routes, key=lambda route: (route.path, sorted(route.methods)))
    has_meanings = any(route.meaning for route in rows)
    head = ["| Path | Methods | Meaning |", "|---|---|---|"]
    out = [f"## {title}", "", *(head if has_meanings else ["| Path | Methods |", "|---|---|"])]
    for route in rows:
        row = f"| `{route.path}` | {', '.join(sorted(route.methods))} |"
        out.append(f"{row} {route.meaning} |" if has_meanings else row)
    return [*out, ""]


def rust_routes(files: Iterable[str]) -> list[Route]:
    """Return the routes of a server in Rust."""
    methods: dict[str, set[str]] = {}
    for file in files:
        source = (ROOT / "crates" / file).read_text(encoding="utf-8")
        for path, handler in ROUTE.findall(source):
            found = {word.upper() for word in METHODS.findall(handler)}
            methods.setdefault(path, set()).update(found or {"GET"})
    return [Route(path, words) for path, words in methods.items()]


def object_routes() -> list[Route]:
    """Return the REST server's routes of `/objects/`, from its own description of them."""
    from mooncake._rest.openapi import description

    return [
        Route(path, {method.upper()}, operation["summary"])
        for path, operations in description()["paths"].items()
        for method, operation in operations.items()
        if method in {"get", "head", "put", "delete"}
    ]


def upstream_routes() -> list[Route]:
    """Return the REST server's routes with upstream's names, from the table that it serves."""
    from mooncake.mooncake_store_service import _ROUTES

    return [
        Route(f"{route.path}{{key}}" if route.takes_key else route.path, {route.method})
        for route in _ROUTES
    ]


def proxy_routes() -> list[Route]:
    """Return the routes of the proxy for prefill and decode servers."""
    from mooncake._proxy.routes import _COMPLETIONS

    source = (ROOT / "python/mooncake/_proxy/routes.py").read_text(encoding="utf-8")
    pages = re.findall(r'head\.path == "([^"]+)"', source)
    return [Route(path, {"POST"}) for path in _COMPLETIONS] + [
        Route(path, {"GET"}) for path in pages
    ]


def metadata_routes() -> list[Route]:
    """Return the routes of `mooncake_http_metadata_server`."""
    source = (ROOT / "python/mooncake/http_metadata_server.py").read_text(encoding="utf-8")
    methods = set(re.findall(r'case "([A-Z]+)":', source))
    return [
        Route(f"{path}?key=…", methods)
        for path in re.findall(r'request\.path != "([^"]+)"', source)
    ]


def routes_page() -> str:
    """List the HTTP paths of all servers."""
    out = ["# HTTP paths", "", HEAD]
    for title, files in RUST_SERVERS.items():
        out += routes_table(title, rust_routes(files))
    out += routes_table("The REST server", object_routes())
    out += [
        "The server describes these routes at `/openapi.json`, with parameters and statuses.",
        "",
    ]
    out += routes_table("The REST server, upstream's routes", upstream_routes())
    out += routes_table("The proxy for prefill and decode servers", proxy_routes())
    out += routes_table("The program mooncake_http_metadata_server", metadata_routes())
    return "\n".join(out)


def write(path: Path, text: str) -> None:
    """Write a page, if it changed."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def write_pages(_app: Sphinx) -> None:
    """Write all pages."""
    folder = ROOT / "docs/reference"
    write(folder / "metrics.md", metrics_page())
    write(folder / "http-paths.md", routes_page())


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the extension."""
    app.connect("config-inited", lambda app, _config: write_pages(app))
    return {"parallel_read_safe": True}
