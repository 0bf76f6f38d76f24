"""Who may ask: hosts, origins and the key."""

from __future__ import annotations

import secrets
from collections.abc import Collection

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from moejax.serve.http.errors import error_response
from moejax.serve.http.openai_requests import Refusal

LOCAL = frozenset(("localhost", "127.0.0.1", "::1"))
"""Names of this machine for itself."""

OPEN_PATHS = frozenset(("/health", "/", "/page.css", "/page.js"))
"""Paths that need no key: they tell nothing of the model or of requests."""


def limit_access(
    app: ASGIApp,
    key: str | None = None,
    hosts: Collection[str] | None = None,
    origins: Collection[str] = (),
) -> ASGIApp:
    """Returns the app behind its checks.

    - `key`: what clients must send as `Authorization: Bearer KEY` or `x-api-key: KEY`, except for
      OPEN_PATHS; None: none.
    - `hosts`: names in the header Host that are answered; None: all. A page of another site whose
      name leads here (DNS rebinding) is of the browser's view this server's own.
    - `origins`: sites whose pages may read answers; "*": all.
    """
    if key is not None:
        app = _require_key(app, key)
    if origins:
        # Outside of the key: a browser asks first, without it.
        app = CORSMiddleware(
            app, allow_origins=[*origins], allow_methods=["*"], allow_headers=["*"]
        )
    return app if hosts is None else _require_host(app, frozenset(hosts))


def _require_host(app: ASGIApp, hosts: frozenset[str]) -> ASGIApp:
    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = _name_of(dict(scope["headers"]).get(b"host", b"").decode("latin-1"))
            if host and host not in hosts:
                refusal = Refusal(
                    403,
                    f"the header Host names {host[:100]!r}, and this server answers to "
                    f"{', '.join(sorted(hosts))}; --allowed-hosts adds names",
                )
                await error_response(refusal)(scope, receive, send)
                return
        await app(scope, receive, send)

    return checked


def _name_of(host: str) -> str:
    """The name in a header Host, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _require_key(app: ASGIApp, key: str) -> ASGIApp:
    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            headers = dict(scope["headers"])
            given = headers.get(b"authorization", b"Bearer " + headers.get(b"x-api-key", b""))
            if not secrets.compare_digest(given, b"Bearer " + key.encode()):
                refusal = Refusal(401, "the API key is missing or wrong", None, "invalid_api_key")
                await error_response(refusal)(scope, receive, send)
                return
        await app(scope, receive, send)

    return checked
