"""What HTTP answers: every operation of the table, views for reading, a stream of events, and how the daemon is.

No rule lives here. A request becomes a caller (access.py) and an operation, and
goes through the gate as it would from the socket.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from guardd.model.answers import Answer
from guardd.model.errors import BadArgument, GuardError, NotAllowed, StoreUnavailable
from guardd.model.ids import check_run
from guardd.protocol.operations import OPERATIONS
from guardd.server import page
from guardd.server.access import Access, NotKnown, Pass
from guardd.server.events import Events
from guardd.server.front import NotHttp, check_host, check_origin, error_response, json_response
from guardd.server.gate import Caller, Gate
from guardd.server.openapi import document
from guardd.server.settings import Settings
from guardd.server.streams import Stream

CLIENT_HEADER = "Guardd-Client"
NESTING_MAX = 40
"""Levels of a body: 32 of a value, and what stands around it."""
VALUES_MAX = 65_536
"""Maps, lists and their members in a body: empty maps are two bytes on the wire and 64 in memory."""


class Routes:
    """The application behind the front."""

    def __init__(self, gate: Gate, events: Events, settings: Settings) -> None:
        self._gate = gate
        self._access = Access(gate)
        self._events = events
        self._settings = settings
        self._streams: set[Stream] = set()
        self._document = json.dumps(document(has_clock=settings.virtual_clock)).encode()

        def get(path: str, handler: Callable[[Request], Awaitable[Response]]) -> Route:
            return Route(path, handler, methods=["GET"])

        self._router = Router(
            [
                Route("/v1/{method}", self._operation, methods=["POST"]),
                get("/v1/runs", self._runs),
                get("/v1/runs/{run:path}", self._inspect),
                get("/v1/trace/{run:path}", self._trace),
                get("/v1/ledger", self._ledger),
                Route("/v1/events", self._stream, methods=["GET"]),
                get("/v1/deny_rules", self._deny_rules),
                get("/openapi.json", self._openapi),
                get("/healthz", self._healthz),
                get("/readyz", self._readyz),
                get("/metrics", self._metrics),
                *page.routes(_check_open),
            ],
            redirect_slashes=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        await self._router(scope, receive, send)

    @property
    def streams(self) -> int:
        """How many listen to events."""
        return len(self._streams)

    def end_streams(self) -> None:
        """The daemon stops: who listens is told so by the end of the stream."""
        for stream in list(self._streams):
            stream.end()

    # ---- Operations ------------------------------------------------------------

    async def _operation(self, request: Request) -> Response:
        """`POST /v1/<method>`: params in, result out."""
        method = request.path_params["method"]
        entered = await self._enter(request, method)
        if method not in OPERATIONS:
            raise NotHttp(404, "no such operation", field="method", value=method, limit=", ".join(OPERATIONS))
        params = parse_body(await self._body(request))
        if method == "before" and not (self._settings.virtual_clock and "client" in params):
            params["client"] = _client_of(request)
        return await self._ask(entered, method, params, request.headers.get("traceparent", ""))

    async def _ask(self, entered: Pass, method: str, params: dict[str, Any], parent: str = "") -> Response:
        caller = await self._access.caller(entered, method)
        result = await self._gate.call(caller, method, params, parent=parent)
        return json_response(result.as_dict() if isinstance(result, Answer) else result)

    async def _enter(self, request: Request, method: str) -> Pass:
        """Who comes in: by a token, or for being here.

        Raises: NotKnown, NotAllowed, StoreUnavailable.
        """
        operation = method if method in OPERATIONS else "http"
        state = request.scope["state"]
        await self._at_the_door(request, check_origin, operation, "foreign Origin")
        door, peer = state["door"], state.get("peer", "")
        entered = await self._access.enter(door, _token_of(request), peer=peer)
        if not entered.token_id:
            await self._at_the_door(request, check_host, operation, "foreign Host")
        return entered

    async def _at_the_door(self, request: Request, check: Callable[[Request], None], method: str, why: str) -> None:
        try:
            check(request)
        except NotAllowed:
            await self._gate.turned_away(request.scope["state"]["door"].name, method, why)
            raise

    async def _body(self, request: Request) -> bytes:
        """The body of a request that says it is JSON.

        Raises: NotHttp: 415, 413.
        """
        kind = request.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise NotHttp(415, "the body is JSON", field="Content-Type", value=kind, limit="application/json")
        most = self._settings.frame_bytes_max
        too_large = NotHttp(413, "the body is too large", field="body", limit=f"{most} bytes")
        if int(request.headers.get("content-length", "0")) > most:
            raise too_large
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise too_large
        return bytes(body)

    # ---- Views for reading -----------------------------------------------------

    async def _runs(self, request: Request) -> Response:
        """`GET /v1/runs`: runs."""
        entered = await self._enter(request, "runs")
        query = _query(request, "limit", "waiting", "run_prefix", "status", "reason", "label")
        return await self._ask(entered, "runs", _typed(query, whole=("limit",), flags=("waiting",)))

    async def _inspect(self, request: Request) -> Response:
        """`GET /v1/runs/{run}`: inspect."""
        entered = await self._enter(request, "inspect")
        _query(request)
        return await self._ask(entered, "inspect", {"run": request.path_params["run"]})

    async def _trace(self, request: Request) -> Response:
        """`GET /v1/trace/{run}`: trace."""
        entered = await self._enter(request, "trace")
        params = _typed(_query(request, "limit", "after", "newest"), whole=("limit",), flags=("newest",))
        return await self._ask(entered, "trace", {"run": request.path_params["run"], **params})

    async def _ledger(self, request: Request) -> Response:
        """`GET /v1/ledger`: ledger."""
        entered = await self._enter(request, "ledger")
        params = _typed(_query(request, "limit", "in_doubt", "run_prefix"), whole=("limit",), flags=("in_doubt",))
        return await self._ask(entered, "ledger", params)

    async def _deny_rules(self, request: Request) -> Response:
        """`GET /v1/deny_rules`: deny_rules."""
        entered = await self._enter(request, "deny_rules")
        _query(request)
        return await self._ask(entered, "deny_rules", {})

    async def _stream(self, request: Request) -> Response:
        """`GET /v1/events`: what watchers hear, as server-sent events."""
        entered = await self._enter(request, "watch")
        query = _query(request, "run")
        run = check_run(query["run"]) if "run" in query else ""
        caller = await self._access.caller(entered, "watch")
        await self._gate.admit(caller, "watch", run or caller.run_prefix, least="reader")

        async def look_again() -> Caller | None:
            """None: the token was taken away."""
            try:
                return await self._access.caller(entered, "watch")
            except NotKnown:
                return None

        prefix = "" if run else caller.run_prefix
        return Stream(self._events, self._streams, request.scope["state"]["connection"], run, prefix, look_again)

    # ---- How the daemon is -----------------------------------------------------

    async def _openapi(self, request: Request) -> Response:
        _check_open(request)
        return Response(self._document, media_type="application/json")

    async def _healthz(self, request: Request) -> Response:
        """The process answers."""
        _check_open(request)
        return json_response({"healthy": True})

    async def _readyz(self, request: Request) -> Response:
        """A script goes to the store and back, and nothing speaks against granting."""
        _check_open(request)
        store = self._gate.engine.context.link.store
        try:
            await self._gate.engine.probe()
            if store.trouble:
                raise StoreUnavailable(store.trouble, field="store", value="not trusted")
        except GuardError as error:
            return error_response(error, 503)
        return json_response({"ready": True})

    async def _metrics(self, request: Request) -> Response:
        """What was counted, and what the store says now."""
        _check_open(request)
        assert self._gate.metrics is not None  # with HTTP there always are
        looked: dict[str, dict[tuple[str, ...], float]] = {}
        engine = self._gate.engine
        try:
            census = await engine.reader.census()
            looked["guardd_claims"] = {(state,): census[state] for state in ("claimed", "in_doubt")}
            looked["guardd_in_doubt_oldest_seconds"] = {(): census["oldest_ms"] / 1000}
            looked["guardd_runs_active"] = {(): census["active"]}
            is_up = True
        except StoreUnavailable:
            is_up = False  # what it would have said is left out, not told as it was
        looked["guardd_store_up"] = {(): float(is_up)}
        looked["guardd_store_trusted"] = {(): float(not engine.context.link.store.trouble)}
        return Response(self._gate.metrics.render(looked), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def parse_body(body: bytes) -> dict[str, Any]:
    """Parameters of a JSON body.

    Raises: BadArgument: no JSON, no map, a member twice, NaN, nested too deep, too many values.
    """
    values = 0

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        count(len(pairs))
        found = dict(pairs)
        if len(found) != len(pairs):
            raise BadArgument("a member name stands twice in one map", field="body", limit="once")
        return found

    def count(more: int) -> None:
        nonlocal values
        values += more + 1
        if values > VALUES_MAX:
            raise BadArgument("a body has too many values", field="body", limit=VALUES_MAX)

    def no_number(text: str) -> Any:
        raise BadArgument("this is no number of JSON", field="body", value=text, limit="a finite number")

    try:
        if body.count(b"[") + body.count(b",") > VALUES_MAX:
            _check_lists(body)
        params = json.loads(body.decode(), object_pairs_hook=members, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise BadArgument(f"the body is no JSON: {error}", field="body", limit="a JSON object in UTF-8") from error
    if not isinstance(params, dict):
        raise BadArgument("params are a map", field="params", value=type(params).__name__, limit="map")
    _check_nesting(params, 1)
    return params


def _check_lists(body: bytes) -> None:
    """Many brackets and commas may stand in texts: outside of them they are values."""
    outside = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
    if sum(part.count(b"[") + part.count(b",") for part in outside) > VALUES_MAX:
        raise BadArgument("a body has too many values", field="body", limit=VALUES_MAX)


def _check_nesting(value: Any, depth: int) -> None:
    if depth > NESTING_MAX:
        raise BadArgument("a body is nested too deep", field="body", limit=f"{NESTING_MAX} levels")
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list):
            _check_nesting(item, depth + 1)


def _check_open(request: Request) -> None:
    """What is told to everybody who is let near at all.

    Raises: NotAllowed.
    """
    check_origin(request)
    check_host(request)


def _token_of(request: Request) -> str | None:
    """The text behind `Bearer`; something else counts as a token that nobody knows."""
    given = request.headers.get("authorization")
    if given is None:
        return None
    scheme, _, token = given.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else given


def _client_of(request: Request) -> str:
    """The instance that asks, as hello names it: a call id belongs to one.

    Raises: BadArgument.
    """
    client = request.headers.get(CLIENT_HEADER, "")
    if not (0 < len(client) <= 128 and client.isascii() and client.isprintable()):
        raise BadArgument(
            f"{CLIENT_HEADER} names the client instance, the same one over resends", field=CLIENT_HEADER, value=client,
            limit="1..128 printable ASCII characters",
        )  # fmt: skip
    return client


def _query(request: Request, *known: str) -> dict[str, str]:
    """What stands behind the question mark.

    Raises: BadArgument: a name that is not known, or twice.
    """
    given = request.query_params.multi_items()
    found = dict(given)
    for name in found:
        if name not in known:
            raise BadArgument(f"no parameter `{name}` here", field=name, limit=f"one of {', '.join(known)}")
    if len(found) != len(given):
        raise BadArgument("a parameter stands twice", field="query", limit="once")
    return found


def _typed(query: Mapping[str, str], *, whole: tuple[str, ...] = (), flags: tuple[str, ...] = ()) -> dict[str, Any]:
    """Texts as what the operation takes; what does not fit is left as it is, and refused there by name."""
    typed: dict[str, Any] = dict(query)
    for name in whole:
        if (text := query.get(name, "")).isdecimal() and len(text) < 17:
            typed[name] = int(text)
    for name in flags:
        if name in query:
            typed[name] = {"1": True, "true": True, "0": False, "false": False}.get(query[name], query[name])
    return typed
