"""A proxy in front of vLLM servers that prefill and vLLM servers that decode.

Run it as `python -m mooncake.vllm_v1_proxy_server`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ._http import listen_failure
from ._proxy.asgi import respond, serve_http, serve_lifespan
from ._proxy.backend import Backend, BackendPool, Timeouts
from ._proxy.proxy import Proxy, prefill_body
from ._proxy.routes import health
from ._proxy.server import ProxyServer
from ._standard_streams import open_closed_streams

if TYPE_CHECKING:
    from ._proxy.asgi import Receive, Scope, Send

    Request: TypeAlias = Any
else:
    # FastAPI passes the request to a parameter of this class.
    Request = getattr(sys.modules.get("starlette.requests"), "Request", Any)

__all__ = [
    "ProxyApp",
    "app",
    "get_next_client",
    "handle_chat_completions",
    "handle_completions",
    "healthcheck",
    "lifespan",
    "logger",
    "main",
    "parse_args",
    "send_request_to_service",
    "stream_service_response",
]

logger = logging.getLogger("mooncake.proxy")


@dataclass(slots=True, eq=False)
class ProxyApp:
    """An application for ASGI servers.

    Attributes:
        proxy: The proxy of this process; None while `lifespan` is not entered.
    """

    proxy: Proxy | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or the life of a server of ASGI.

        The server enters `lifespan` with the default options, unless the program has entered it
        with others before.

        Raises:
            ValueError: It is neither.
            RuntimeError: `lifespan` is not entered.
        """
        if scope["type"] == "http":
            await serve_http(_running(self), scope, receive, send)
        elif scope["type"] == "lifespan":
            life = nullcontext() if self.proxy is not None else lifespan(self, parse_args([]))
            await serve_lifespan(receive, send, life)
        else:
            raise ValueError(f"the proxy does not serve {scope['type']!r}")


app = ProxyApp()


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line.

    `prefiller_instances` and `decoder_instances` are lists of host and port.

    Raises:
        ValueError: There are more or fewer hosts than ports, or than bootstrap ports; or a host, a
            port or a time cannot be one.
    """
    parser = argparse.ArgumentParser(
        description="A proxy in front of vLLM servers that prefill and that decode.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--port", type=int, default=8000, help="port to listen at")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at")
    for role, port in (("prefiller", 8100), ("decoder", 8200)):
        parser.add_argument(
            f"--{role}-hosts",
            f"--{role}-host",
            nargs="+",
            default=["localhost"],
            help=f"hosts of the {role}s",
        )
        parser.add_argument(
            f"--{role}-ports",
            f"--{role}-port",
            nargs="+",
            type=int,
            default=[port],
            help=f"their ports, one per host of a {role}",
        )
    parser.add_argument(
        "--prefiller-bootstrap-ports",
        "--prefiller-bootstrap-port",
        nargs="+",
        type=int,
        default=None,
        help="VLLM_MOONCAKE_BOOTSTRAP_PORT of the prefillers, one per host, "
        "for the MooncakeConnector of vLLM 0.13 and later",
    )
    defaults = Timeouts()
    for name, default, text in (
        ("connect", defaults.connect, "time-out of a connection to a server, in seconds"),
        ("answer", defaults.answer, "time-out until a server begins to answer, in seconds"),
        ("idle", defaults.idle, "time-out between two pieces of an answer, in seconds"),
    ):
        parser.add_argument(f"--{name}-timeout", type=float, default=default, help=text)
    parser.add_argument(
        "--health-interval", type=float, default=5.0, help="seconds between health checks"
    )
    options = parser.parse_args(arguments)
    for role in ("prefiller", "decoder"):
        hosts, ports = getattr(options, f"{role}_hosts"), getattr(options, f"{role}_ports")
        if len(hosts) != len(ports):
            raise ValueError(
                f"Number of {role} hosts must match number of {role} ports: "
                f"{len(hosts)} and {len(ports)}; give --{role}-ports a port for each host"
            )
        setattr(options, f"{role}_instances", list(zip(hosts, ports, strict=True)))
    given, hosts = options.prefiller_bootstrap_ports, options.prefiller_hosts
    if given is not None and len(given) != len(hosts):
        raise ValueError(
            f"Number of prefiller hosts must match number of prefiller bootstrap ports: "
            f"{len(hosts)} and {len(given)}; give --prefiller-bootstrap-ports a port for each host"
        )
    _check_values(options)
    return options


def _check_values(options: argparse.Namespace) -> None:
    """Check that hosts, ports and times of the options can be used.

    Raises:
        ValueError: One cannot.
    """
    for name, given in vars(options).items():
        option = "--" + name.replace("_", "-")
        if name.endswith("_hosts"):
            for host in given:
                if not _is_host(host):
                    raise ValueError(f"{option}: {host!r} is not a host: give a name or an address")
        elif name.endswith("_ports"):
            for port in given or ():
                if not 0 < port < 65536:
                    raise ValueError(f"{option}: {port} is not a port: give 1 to 65535")
        elif name.endswith(("_timeout", "_interval")) and not given > 0:
            raise ValueError(f"{option}: {given:g} is not a time: give seconds above 0")


def _is_host(host: str) -> bool:
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


@asynccontextmanager
async def lifespan(app: ProxyApp, options: argparse.Namespace | None = None) -> AsyncIterator[None]:
    """Make the proxy of an application, and check its servers while the context lasts.

    Args:
        app: The application.
        options: Options as of `parse_args`; None stands for the command line.
    """
    options = options or parse_args()
    timeouts = Timeouts(options.connect_timeout, options.answer_timeout, options.idle_timeout)
    prefillers = options.prefiller_instances
    bootstraps = options.prefiller_bootstrap_ports or [None] * len(prefillers)
    app.proxy = Proxy(
        BackendPool(
            "prefill",
            [
                Backend("prefill", host, port, bootstrap)
                for (host, port), bootstrap in zip(prefillers, bootstraps, strict=True)
            ],
        ),
        BackendPool("decode", [Backend("decode", *at) for at in options.decoder_instances]),
        timeouts,
    )
    checks = asyncio.create_task(app.proxy.check_backends(options.health_interval))
    try:
        yield
    finally:
        app.proxy = None
        checks.cancel()
        await asyncio.gather(checks, return_exceptions=True)


def get_next_client(app: ProxyApp, service_type: str) -> Backend:
    """Return the backend of a role, `prefill` or `decode`, whose turn it is.

    Raises:
        ValueError: There is no such role.
        RuntimeError: The application does not run.
    """
    if service_type not in ("prefill", "decode"):
        raise ValueError(f"service_type must be prefill or decode: {service_type!r}")
    proxy = _running(app)
    pool = proxy.prefill if service_type == "prefill" else proxy.decode
    return pool.next()


async def send_request_to_service(
    client_info: Backend, endpoint: str, req_data: Mapping[str, Any], request_id: str | None = None
) -> dict[str, Any]:
    """Let a backend prefill a request, and return its answer.

    Raises:
        BackendError: It did not answer.
        RuntimeError: It answered with an error.
    """
    headers = {"X-Request-Id": request_id or str(uuid.uuid4())}
    body = prefill_body(req_data)
    async with client_info.call(endpoint, body, headers, Timeouts()) as answer:
        text = await answer.body()
        if answer.head.status >= 400:
            raise RuntimeError(f"{client_info.name} answered {answer.head.status}")
        return dict(json.loads(text))


async def stream_service_response(
    client_info: Backend, endpoint: str, req_data: Mapping[str, Any], request_id: str | None = None
) -> AsyncIterator[bytes]:
    """Yield a backend's answer as it arrives.

    Raises:
        BackendError: It did not answer, or the answer broke off.
        RuntimeError: It answered with an error.
    """
    headers = {"X-Request-Id": request_id or str(uuid.uuid4())}
    async with client_info.call(endpoint, req_data, headers, Timeouts()) as answer:
        if answer.head.status >= 400:
            raise RuntimeError(f"{client_info.name} answered {answer.head.status}")
        async for piece in answer.chunks():
            yield piece


async def handle_completions(request: Request) -> Any:
    """Answer `/v1/completions`, as a route of a program that has Starlette or FastAPI.

    The proxy is that of the request's application, if `lifespan` was entered with it, else that of
    `app`. Errors are answers, too.

    Raises:
        RuntimeError: `lifespan` is not entered.
    """
    return await respond(_proxy_of(request), "/v1/completions", request)


async def handle_chat_completions(request: Request) -> Any:
    """Answer `/v1/chat/completions`, as `handle_completions`."""
    return await respond(_proxy_of(request), "/v1/chat/completions", request)


async def healthcheck() -> dict[str, Any]:
    """Return how many servers the proxy of `app` has.

    Raises:
        RuntimeError: `lifespan` is not entered.
    """
    return health(_running(app))


async def _run(options: argparse.Namespace) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with lifespan(app, options), AsyncExitStack() as stack:
        server = ProxyServer(_running(app), health_interval_s=None)
        try:
            port = await stack.enter_async_context(server.serving(options.host, options.port))
        except (OSError, OverflowError) as error:
            reason = listen_failure(options.host, options.port, error)
            sys.exit(f"vllm_v1_proxy_server: {reason}")
        print(f"vllm_v1_proxy_server ready http={options.host}:{port}", flush=True)
        await stopped.wait()


def _proxy_of(request: Any) -> Proxy:
    own = getattr(getattr(request, "app", None), "proxy", None)
    return own if isinstance(own, Proxy) else _running(app)


def _running(app: ProxyApp) -> Proxy:
    if app.proxy is None:
        raise RuntimeError("the proxy does not run: enter lifespan(app) first")
    return app.proxy


def main() -> None:
    """Run the proxy until SIGINT or SIGTERM.

    Raises:
        SystemExit: With 1 if it cannot listen, and with 2 for wrong usage; the reason is printed.
    """
    open_closed_streams()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    try:
        options = parse_args()
    except ValueError as error:
        print(f"vllm_v1_proxy_server: {error}", file=sys.stderr)
        sys.exit(2)
    asyncio.run(_run(options))


if __name__ == "__main__":
    main()
