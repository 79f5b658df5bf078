"""Refuses requests that must not get in, answers those that fail, and counts all of them."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import logging
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from recognition.serving.limits import CLOSED_BY_CLIENT, ApiError
from recognition.serving.service import SpeechService

log = logging.getLogger(__name__)
OPEN_PATHS = ("/", "/healthz")
"""They show nothing that needs a token."""
ROUTES = (*OPEN_PATHS, "/v1/audio/transcriptions", "/v1/models", "/stream", "/metrics")
PROTOCOL, TOKEN_PROTOCOL = "starling", "bearer."
"""Subprotocols of a WebSocket: its name, and what a token in base64url follows, for browsers, which set no headers."""
_DISCARD_S, _DISCARD_PAUSE_S = 10.0, 1.0
"""Time for the rest of a refused upload, and the longest pause in it."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def client_of(scope: Scope) -> str:
    """Address of a request's client."""
    return str((scope.get("client") or ("unknown",))[0])


def authorized(scope: Scope, token: str | None) -> bool:
    """Whether a request shows the token, if there is one; takes the same time for all wrong ones."""
    if token is None:
        return True
    headers = Headers(scope=scope)
    kind, _, shown = headers.get("authorization", "").partition(" ")
    given = shown.strip().encode("latin-1", "replace") if kind.lower() == "bearer" else b""
    for protocol in scope.get("subprotocols", ()):
        if protocol.startswith(TOKEN_PROTOCOL):
            text = protocol.removeprefix(TOKEN_PROTOCOL)
            with suppress(binascii.Error, ValueError):
                given = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    # digests, so that the length of the token does not show either
    return hmac.compare_digest(hashlib.sha256(given).digest(), hashlib.sha256(token.encode()).digest())


class Gate:
    """The outermost layer of the application.

    Args:
        app: The application.
        service: The server's parts.
    """

    def __init__(self, app: ASGIApp, service: SpeechService) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        body = _Body(scope, receive)
        answer = _Answer(scope, send, self.service.limits.idle_s, body)
        begin, code = time.monotonic(), ""
        try:
            self._check(scope)
            await self.app(scope, body.receive, answer.send)
        except ApiError as error:
            code = error.code
            await answer.refuse(error)
        except (ClientDisconnect, ConnectionError, TimeoutError):
            answer.status = CLOSED_BY_CLIENT
        except Exception as error:  # a bug; its text may hold what was said
            log.exception("a request failed")
            code = type(error).__name__
            await answer.refuse(ApiError(500, "the server failed; its log says why", "server_error"))
        finally:
            self._count(scope, answer, code, time.monotonic() - begin)

    def _check(self, scope: Scope) -> None:
        """Check that the client may use the server.

        Raises:
            ApiError: It may not.
        """
        token = self.service.token
        if token is None:
            _check_origin(scope)
        elif scope["path"] not in OPEN_PATHS and not authorized(scope, token):
            raise ApiError(
                401,
                "this server asks for a token: send the header `Authorization: Bearer TOKEN`",
                "invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _count(self, scope: Scope, answer: _Answer, code: str, seconds: float) -> None:
        path = scope["path"]
        route = "/v1/models" if path.startswith("/v1/models/") else path if path in ROUTES else "other"
        figures = self.service.metrics
        figures.requests.labels(route, str(answer.status)).inc()
        figures.seconds.labels(route).observe(seconds)
        code = code or answer.code
        if code:
            figures.rejected.labels(code).inc()
            self.service.log.write(
                "rejected", route=route, status=answer.status, code=code, client=client_of(scope), took_s=seconds
            )


def _check_origin(scope: Scope) -> None:
    """Check that a request without a token comes from this machine, and not from a page of another server in a browser.

    Raises:
        ApiError: It does not.
    """
    headers = Headers(scope=scope)
    host, origin = headers.get("host", ""), headers.get("origin")
    with suppress(ValueError):
        if urlsplit(f"//{host}").hostname in LOOPBACK_NAMES and (not origin or urlsplit(origin).netloc == host):
            return
    raise ApiError(403, "without a token this server answers its own machine only, by the name localhost", "forbidden")


class _Body:
    """The body of a request, and whether all of it has been received."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        headers = Headers(scope=scope)
        self._receive = receive
        self._left = scope["type"] == "http" and ("transfer-encoding" in headers or "content-length" in headers)
        self._awaited = "expect" in headers  # such a client sends the body after a first answer only

    async def receive(self) -> Message:
        """Receive a message."""
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._left = False
        self._awaited = False
        return message

    async def discard(self) -> None:
        """Receive the rest, in bounded time.

        A connection that is closed before its client has sent everything is reset, and the answer is lost.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_S):
                while self._left and not self._awaited:
                    async with asyncio.timeout(_DISCARD_PAUSE_S):
                        await self.receive()


class _Answer:
    """Sends an answer, in bounded time, and remembers its status."""

    def __init__(self, scope: Scope, send: Send, patience_s: float, body: _Body) -> None:
        self._scope, self._send, self._patience_s, self._body = scope, send, patience_s, body
        self._started = False
        self.status = CLOSED_BY_CLIENT
        self.code = ""

    async def send(self, message: Message) -> None:
        """Send a part of it; a client that does not read it loses it."""
        if message["type"] in ("http.response.start", "websocket.http.response.start", "websocket.accept"):
            self._started = True
            self.status = message.get("status", 101)
            if self.status >= 400:
                await self._body.discard()
            self.code = Headers(raw=message.get("headers", [])).get(CODE_HEADER, "")
        async with asyncio.timeout(self._patience_s):
            await self._send(message)

    async def refuse(self, error: ApiError) -> None:
        """Answer with an error, unless another answer has begun."""
        if self._started:
            return
        content = json.dumps(error.content()).encode()
        prefix = "websocket.http" if self._scope["type"] == "websocket" else "http"
        headers = {"content-type": "application/json", "content-length": str(len(content)), **error.headers}
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        start: dict[str, Any] = {"type": f"{prefix}.response.start", "status": error.status, "headers": raw}
        with suppress(OSError, TimeoutError):  # it has gone
            await self.send(start)
            await self.send({"type": f"{prefix}.response.body", "body": content})


CODE_HEADER = "x-error-code"
"""Names the error in answers that the application gives."""
