"""``moejax serve`` answers requests over OpenAI's HTTP API."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import signal
import socket
from typing import TYPE_CHECKING

from moejax.commands import add_command, say
from moejax.commands.model import add_model_option, add_model_options, engine_options, start_llm
from moejax.errors import UserError
from moejax.interrupt import end_command

if TYPE_CHECKING:
    from moejax import LLM

_EPILOG = """\
examples:
  moejax serve
      the embedded model at http://127.0.0.1:8000/v1
  moejax serve Qwen/Qwen3-30B-A3B --memory 16GiB --host 0.0.0.0 --api-key SECRET
      a model of the Hugging Face hub, for other machines too

  SIGTERM ends it when the running requests have ended; so does Ctrl-C, which does not wait for a
  step that takes longer than 1.5 s.
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    serve = add_command(
        commands, "serve", _run, "answer requests over HTTP, as OpenAI's API", _EPILOG
    )
    add_model_option(serve, positional=True)
    server = serve.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address (default: 127.0.0.1)")
    server.add_argument(
        "--port", type=int, default=8000, metavar="N", help="port; 0: a free one (default: 8000)"
    )
    server.add_argument("--api-key", metavar="KEY", help="the key that clients must send")
    server.add_argument(
        "--allowed-hosts",
        metavar="NAMES",
        help="names in the header Host that are answered, with commas; * for all (default: with a "
        "--host of this machine alone its names, else all)",
    )
    server.add_argument(
        "--allowed-origins",
        metavar="SITES",
        help="sites whose pages may use the server, with commas or as vLLM's JSON list; * for all "
        "(default: none)",
    )
    server.add_argument(
        "--max-requests",
        type=int,
        default=1024,
        metavar="N",
        help="most requests at once, running and waiting, one with n=5 as 5; more get status 503 "
        "(default: 1024)",
    )
    server.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="most seconds of a request, waiting included; then it ends with 504 (default: none)",
    )
    server.add_argument(
        "--served-model-name", metavar="NAME", help="the model's name for clients (default: PATH)"
    )
    server.add_argument(
        "--tool-call-parser",
        default="auto",
        metavar="NAME",
        help="how the model writes calls of tools and reasoning: hermes, qwen3_coder, glm45, "
        "deepseek_v3, kimi_k2, openai, or none (default: as its chat template shows)",
    )
    add_model_options(serve)
    serve.set_defaults(json=False)
    serve.add_argument("--quiet", action="store_true", help="no progress")


def _run(args: argparse.Namespace) -> int:
    options = engine_options(args)
    if args.api_key == "":
        raise UserError("--api-key is empty; leave it out, or name a key")
    if args.max_requests < 1:
        raise UserError(f"--max-requests must be at least 1, got {args.max_requests}")
    if args.timeout is not None and not args.timeout > 0:
        raise UserError(f"--timeout must be above 0, got {args.timeout:g}")
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"the server needs {error.name}, which is not installed here: pip install "
            "'moejax[serve]'"
        ) from None
    from moejax.serve.engine_thread import EngineDeadError

    # The address is bound before the model is read, which may take long.
    with _bind(args.host, args.port) as bound, start_llm(args, options) as llm:
        try:
            asyncio.run(_serve(args, llm, bound))
        except EngineDeadError as error:  # the step that hangs would keep the process
            end_command(str(error))
    return 0


def _names(given: str) -> list[str]:
    """Names with commas between them, or vLLM's JSON list of names."""
    with contextlib.suppress(ValueError):
        if isinstance(found := json.loads(given), list):
            return [*map(str, found)]
    return [name.strip() for name in given.split(",") if name.strip()]


def _hosts(args: argparse.Namespace) -> list[str] | None:
    """The names in the header Host that are answered; None: all."""
    from moejax.serve.http.access import LOCAL

    if args.allowed_hosts is None:
        return [*LOCAL, args.host] if args.host in LOCAL else None
    names = _names(args.allowed_hosts)
    return None if "*" in names else [*LOCAL, *(name.lower() for name in names)]


def _bind(host: str, port: int) -> socket.socket:
    """Binds a socket, which refuses connections until it listens. Raises UserError for an address
    that cannot be used."""
    if not 0 <= port <= 65535:
        raise UserError(f"--port must be in [0, 65535], got {port}")
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise UserError(
            f"{host}, port {port}, cannot be used ({error.strerror}); choose another --host or "
            "--port"
        ) from None
    return bound


async def _serve(args: argparse.Namespace, llm: LLM, bound: socket.socket) -> None:
    import uvicorn

    from moejax.serve.async_llm import AsyncLLM
    from moejax.serve.http.access import limit_access
    from moejax.serve.http.app import make_app
    from moejax.serve.http.limits import Limits

    name = args.served_model_name or args.model
    host, port = bound.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    # uvicorn sends the signal to its own process again when it has ended.
    signal.signal(signal.SIGTERM, lambda *_: None)
    async with AsyncLLM(llm) as served:
        limits = Limits(args.max_requests, args.timeout)
        app = make_app(llm, served, name, args.tool_call_parser, lambda: server.should_exit, limits)
        app = limit_access(
            app,
            args.api_key,
            _hosts(args),
            _names(args.allowed_origins) if args.allowed_origins else (),
        )
        # What the start made stays: collections, which stop all answers, need not look through it.
        # What requests leave is garbage, which must not pile up as long as during a start.
        gc.freeze()
        gc.set_threshold(700)
        # Connections wait from now on.
        bound.listen(128)
        say(f"{name} answers at http://{address}/v1, and shows itself at http://{address}/")
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        await server.serve([bound])
