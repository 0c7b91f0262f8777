"""What stands before every HTTP request: browsers of others, security headers, and errors as JSON.

Any web page that a person has open can reach loopback (SPEC 4). It cannot set
`Host` to what is not its own name, cannot leave out `Origin`, and cannot send
JSON to another origin without asking first, which nobody answers here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from guardd.model.errors import BadArgument, GuardError, NotAllowed, StoreUnavailable
from guardd.server.access import NotKnown

log = structlog.get_logger()

LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
RETRY_AFTER_S = 1

STATUSES: Mapping[str, int] = {
    "bad_argument": 400,
    "change_required": 400,
    "effect_key_missing": 400,
    "clock_not_allowed": 400,
    "not_allowed": 403,
    "unknown_call": 404,
    "unknown_run": 404,
    "unknown_operation": 404,
    "call_conflict": 409,
    "not_resumable": 409,
    "limits_needed": 409,
    "in_flight": 409,
    "already_committed": 409,
    "run_lost": 409,
    "store_unavailable": 503,
    "store_refused": 503,
    "audit_unavailable": 503,
}
"""Of every error by its name. A token that is none is 401; what is wrong with the request as HTTP has its own status."""

REQUEST_STATUSES: Mapping[int, str] = {
    401: "no token where one is needed, or one that is unknown, revoked or expired (`not_allowed`)",
    404: "no such path or operation (`bad_argument`)",
    405: "no such method here (`bad_argument`)",
    413: "the body is too large (`bad_argument`)",
    415: "the body does not say that it is JSON (`bad_argument`)",
    500: "a defect of ours (`store_unavailable`): nothing was granted, the log has the trace",
}
"""Of requests that are none, whatever they ask."""

HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; object-src 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
"""On every response that does not say otherwise; there are no CORS headers."""


class NotHttp(BadArgument):
    """The request is none that is taken, before anybody looks at what it asks. status: that says why."""

    def __init__(self, status: int, message: str, *, field: str, value: Any = None, limit: Any = None) -> None:
        super().__init__(message, field=field, value=value, limit=limit)
        self.status = status


def status_of(error: GuardError) -> int:
    """The status that goes with an error."""
    if isinstance(error, NotHttp):
        return error.status
    return 401 if isinstance(error, NotKnown) else STATUSES[error.name]


def error_response(error: GuardError, status: int | None = None) -> Response:
    """An error as it goes over the socket, with its status."""
    code = status or status_of(error)
    headers = {}
    if code == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if code == 503:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    return json_response(error.as_dict(), code, headers)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A value as JSON; integers of any size and text of any kind stay what they are."""
    body = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Response(body, status, headers=headers, media_type="application/json")


class Front:
    """The outermost application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        is_started = False

        async def send_on(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                given = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(each for each in HEADERS if each[0] not in given)]
            await send(message)

        try:
            await self._app({**scope, "app": self}, receive, send_on)
            return
        except GuardError as error:
            response = error_response(error)
        except HTTPException as error:
            what = "no such method here" if error.status_code == 405 else "nothing is served there"
            said = NotHttp(error.status_code, what, field="method" if error.status_code == 405 else "path")
            response = error_response(said)
            response.headers.update(error.headers or {})
        except ClientDisconnect:
            return
        except Exception:
            # A defect of ours must not look like an answer: nothing is granted, and the log has the trace.
            log.exception("request.failed", method=scope["method"])
            broken = StoreUnavailable("the daemon failed at this request; see its log", field="daemon")
            response = error_response(broken, 500)
        if is_started:
            scope["state"]["connection"].cut("a response that failed half way")
            return
        await response(scope, receive, send_on)


def check_origin(request: Request) -> None:
    """A browser names the page that asks: it has to be ours.

    Raises: NotAllowed.
    """
    origin, host = request.headers.get("origin"), request.headers.get("host", "")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        raise NotAllowed("pages of other origins are not served", field="Origin", value=origin, limit=host)


def check_host(request: Request) -> None:
    """Where no token is needed a name of ours has to be asked for: a page may have made its own name point here.

    Raises: NotAllowed.
    """
    state = request.scope["state"]
    if state["is_unix"] or state["door"].role is None:
        return
    host = request.headers.get("host", "")
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    if name.lower() not in LOCAL_HOSTS:
        raise NotAllowed(
            "without a token only this machine's own names are served: ask for 127.0.0.1 or localhost, or bring a token",
            field="Host", value=host, limit=", ".join(sorted(LOCAL_HOSTS)),
        )  # fmt: skip
