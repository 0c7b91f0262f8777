"""HTTP of a daemon process: the same answers as on the socket, and what stands before them (docs/http.md)."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from guardd_client import AsyncGuard, GuardRequestError

from guardd.model.errors import ERRORS
from guardd.protocol.operations import OPERATIONS, ROLES
from guardd.server.front import STATUSES
from tests.certificates import Authority
from tests.server.test_audit import PARAMS
from tests.servers import Server
from tests.web import JSON, Web, web

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = ("--operator-socket", "FOLDER/operator.sock")
READY = "unix:FOLDER/operator.sock"


@pytest.fixture
async def served(embedded: Server, prefix: str) -> AsyncIterator[Web]:
    async with web(embedded.url, prefix) as it:
        yield it


# ---- Operations ---------------------------------------------------------------------


def test_every_error_has_a_status() -> None:
    assert set(STATUSES) == set(ERRORS)


async def test_every_operation_answers_as_on_the_socket(served: Web) -> None:
    """Each on a run of its own; but for times, epochs and random ids."""
    token = await served.token("operator")

    def masked(value: Any, run: str) -> Any:
        text = json.dumps(value, sort_keys=True).replace(run, "RUN")
        return re.sub(
            r'"(epoch|id|token|wall_ms|\w*ms|ended_at|at|key|provider_key|prev)": ("[^"]*"|\d+)', r'"\1": *', text
        )

    async with AsyncGuard(served.daemon.url) as guard:

        async def by_socket(method: str, params: dict[str, Any]) -> tuple[int, Any]:
            try:
                answer = await guard.call(method, params)
            except GuardRequestError as error:
                return STATUSES[error.name], error.name
            return 200, answer

        async def by_http(method: str, params: dict[str, Any]) -> tuple[int, Any]:
            said = await served.ask(method, params, token=token)
            body = said.json()
            if said.status_code != 200:
                return said.status_code, body["error"]
            return 200, body

        for method in OPERATIONS:
            answers = []
            for ask, run in ((by_socket, f"s-{method}"), (by_http, f"h-{method}")):
                params = dict(PARAMS[method])
                if "run" in params:
                    params["run"] = run
                    if method in ("after", "renew", "inspect", "trace", "export", "forget", "resume"):
                        await guard.call("before", {"run": run, "call": "c", "tool": "t", "args": {"q": 1}})
                if method in ("runs", "ledger", "audit"):
                    params["limit"] = 1
                status, answer = await ask(method, params)
                answers.append((status, masked(answer, run)))
                assert status == 200 or method == "settle", (method, answer)
            if method != "audit":  # its newest entry is another one each time
                assert answers[0] == answers[1], method


async def test_a_call_id_belongs_to_the_client_that_the_header_names(served: Web) -> None:
    call = {"run": "r", "call": "c", "tool": "t"}
    first = await served.ask("before", call, client="one")
    again = await served.ask("before", call, client="one")
    other = await served.ask("before", call, client="two")
    assert (first.json()["step"], again.json()["step"]) == (1, 1)
    assert (other.status_code, other.json()["error"]) == (409, "call_conflict")
    for bad in ("", "x" * 129):
        refused = await served.ask("before", call, client=bad)
        assert (refused.status_code, refused.json()["field"]) == (400, "Guardd-Client")
    named = await served.ask("before", call | {"client": "two"}, client="one")
    assert named.json()["step"] == 1, "the header names the client, not the body"


async def test_views_show_what_the_operations_do(served: Web) -> None:
    async with AsyncGuard(served.daemon.url) as guard:
        await guard.call("open", {"run": "a", "labels": {"team": "x"}})
        await guard.call("before", {"run": "b/c", "call": "1", "tool": "t", "idempotency_key": "k"})
        await guard.call("kill", {"run": "a", "reason": "incident_stop"})

        async def names(query: str) -> list[str]:
            return [run["run"] for run in (await served.http.get(f"/v1/runs?{query}")).json()]

        assert await names("") == [run["run"] for run in await guard.call("runs", {})] == ["b", "a"]
        assert await names("status=ended") == await names("reason=incident_stop") == ["a"]
        assert await names("label=team") == await names("label=team=x") == ["a"]
        assert await names("label=team=y") == await names("waiting=1") == []
        assert await names("limit=1") == ["b"]
        shown = (await served.http.get("/v1/runs/b/c")).json()
        assert shown == await guard.call("inspect", {"run": "b/c"})
        assert (await served.http.get("/v1/trace/b?limit=5")).json() == await guard.call("trace", {"run": "b"})
        for call in ("2", "3"):
            await guard.call("before", {"run": "b/c", "call": call, "tool": "t"})
        all_of_b = await guard.call("trace", {"run": "b"})
        assert (await served.http.get("/v1/trace/b?limit=2&newest=true")).json() == all_of_b[-2:] != all_of_b[:2]
        refused = await served.http.get("/v1/trace/b?newest=true&after=1-1")
        assert (refused.status_code, refused.json()["field"]) == (400, "after")
        assert (await served.http.get("/v1/ledger")).json() == await guard.call("ledger", {})
        assert (await served.http.get("/v1/ledger?in_doubt=true")).json() == []
        await guard.call("deny_rule", {"id": "inc-1", "tool": "pay*", "note": "double pay"})
        await guard.call("deny_rule", {"id": "over", "tool": "*", "until_ms": 1})
        assert (await served.http.get("/v1/deny_rules")).json() == [
            {"id": "inc-1", "tool": "pay*", "run_prefix": "", "until_ms": None, "note": "double pay"}
        ]


@pytest.mark.parametrize(
    ("path", "status", "field"),
    [
        ("/v1/runs?limit=x", 400, "limit"), ("/v1/runs?limit=0&status=running", 400, "limit"), ("/v1/runs?colour=red", 400, "colour"),
        ("/v1/runs?waiting=perhaps", 400, "waiting"), ("/v1/runs?limit=1&limit=2", 400, "query"), ("/v1/runs/nobody", 404, "run"),
        ("/v1/runs/a//b", 400, "run"), ("/v1/ledger?limit=1001", 400, "limit"), ("/nothing", 404, "path"),
        ("/v1/before", 405, "method"), ("/v1/events?run=%00", 400, "run"),
    ],
)  # fmt: skip
async def test_a_view_names_what_is_wrong(path: str, status: int, field: str, served: Web) -> None:
    said = await served.http.get(path)
    assert (said.status_code, said.json()["field"]) == (status, field)
    assert said.headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors 'none'" in said.headers["content-security-policy"]
    assert not any(name.startswith("access-control") for name in said.headers)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400), (b"[]", 400), (b"null", 400), (b"{", 400), (b'{"limit": NaN}', 400), (b'{"limit": 1, "limit": 2}', 400),
        (b'{"x": "\xff"}', 400), (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400), (b'{"x":' * 50 + b"1" + b"}" * 50, 400),
        (b'{"x": [' + b"{}," * 70_000 + b"{}]}", 400), (b'{"x": "' + b"," * 200_000 + b'"}', 400), (b'{"x": "' + b"y" * 1_048_576 + b'"}', 413),
    ],
)  # fmt: skip
async def test_a_body_that_is_none_is_refused_by_name(body: bytes, status: int, served: Web) -> None:
    said = await served.http.post("/v1/runs", content=body, headers=JSON)
    assert (said.status_code, said.json()["error"]) == (status, "bad_argument")
    assert (await served.http.get("/healthz")).status_code == 200


async def test_a_body_without_a_length_is_bounded_too(served: Web) -> None:
    async def drops() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 65_536

    with suppress(httpx.WriteError):  # the connection may be closed before all was sent
        assert (await served.http.post("/v1/runs", content=drops(), headers=JSON)).status_code == 413
    assert (await served.http.get("/healthz")).status_code == 200


# ---- Who may ask ----------------------------------------------------------------------


async def test_a_web_page_of_others_gets_nothing(served: Web) -> None:
    """SPEC 4: a local Host, no foreign Origin, JSON bodies only."""
    own = served.base
    for headers, is_served in (
        ({}, True), ({"Host": "localhost:1"}, True), ({"Host": "[::1]"}, True), ({"Origin": own}, True),
        ({"Host": "evil.test"}, False), ({"Host": "127.0.0.1.evil.test"}, False), ({"Host": ""}, False),
        ({"Origin": "http://evil.test"}, False), ({"Origin": "null"}, False), ({"Origin": "http://localhost:1"}, False),
    ):  # fmt: skip
        for path in ("/v1/runs", "/healthz", "/metrics", "/openapi.json"):
            said = await served.http.get(path, headers=headers)
            assert said.status_code == (200 if is_served else 403), (headers, path, said.text)
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        said = await served.http.post("/v1/runs", content=b"{}", headers={"Content-Type": kind})
        assert said.status_code == 415
    lines = (served.daemon.folder / "state" / "audit.jsonl").read_text()
    assert "foreign Host" in lines and "foreign Origin" in lines


async def test_over_tcp_nobody_without_a_token_is_operator(served: Web) -> None:
    """Although everybody on the socket is."""
    for operation in OPERATIONS.values():
        said = await served.ask(operation.name, PARAMS[operation.name])
        assert (said.status_code == 403) == (operation.role == "operator"), operation.name
    made = await served.token("operator")
    assert (await served.ask("kill", {"run": "r"}, token=made)).json()["action"] == "stop"
    assert (await served.ask("runs", token=made, Host="guard.example")).status_code == 200
    for wrong in ("guardd_nonsense", made + "x"):
        said = await served.ask("runs", token=wrong)
        assert (said.status_code, said.headers["www-authenticate"]) == (401, "Bearer")


async def test_with_tokens_each_role_reaches_as_far_as_on_the_socket(embedded: Server, prefix: str) -> None:
    async with web(embedded.url, prefix, "--auth", "tokens", *OPERATORS, ready=READY) as served:
        operators = f"unix:{served.daemon.folder}/operator.sock"
        assert (await served.ask("runs")).status_code == 401
        assert (await served.http.get("/v1/events")).status_code == 401
        for path in ("/healthz", "/readyz", "/metrics", "/openapi.json"):
            assert (await served.http.get(path, headers={"Host": "probe"})).status_code == 200
        for role in ROLES:
            token = await served.token(role, operators)
            for method, operation in OPERATIONS.items():
                said = await served.ask(method, PARAMS[method], token=token)
                is_refused = ROLES.index(role) < ROLES.index(operation.role)
                assert (said.status_code == 403) == is_refused, (role, method, said.text)
        bound = await served.token("worker", operators, run_prefix="team-a.")
        assert (await served.ask("open", {"run": "team-a.1"}, token=bound)).status_code == 200
        assert (await served.ask("open", {"run": "team-b.1"}, token=bound)).status_code == 403
        headers = {"Authorization": f"Bearer {bound}"}
        assert [run["run"] for run in (await served.http.get("/v1/runs", headers=headers)).json()] == ["team-a.1"]
        assert (await served.http.get("/v1/events?run=team-b.1", headers=headers)).status_code == 403


async def test_beyond_loopback_http_needs_tokens_and_tls(embedded: Server, prefix: str, tmp_path: Path) -> None:
    from tests.server.test_security import start_fails

    code, said = await start_fails(embedded, "--listen", f"unix:{tmp_path}/d.sock", "--http-listen", "tcp://0.0.0.0:0")
    assert (code, "http_listen" in said, "--auth tokens --tls-cert" in said) == (2, True, True)
    authority = Authority.make(tmp_path)
    certificate, key = authority.sign("guard.test")
    options = ("--auth", "tokens", "--tls-cert", str(certificate), "--tls-key", str(key), *OPERATORS)
    async with web(embedded.url, prefix, *options, ready=READY) as served:
        assert served.base.startswith("https://")
        import ssl

        trusted = ssl.create_default_context(cafile=str(authority.path))
        async with httpx.AsyncClient(base_url=served.base, verify=trusted, trust_env=False) as http:
            assert (await http.get("/readyz")).json() == {"ready": True}


async def test_a_unix_socket_serves_http_to_operators(embedded: Server, prefix: str) -> None:
    async with web(embedded.url, prefix, "--http-listen", "unix:FOLDER/h.sock") as served:
        path = served.daemon.folder / "h.sock"
        assert path.stat().st_mode & 0o777 == 0o600
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(base_url="http://guard", transport=transport) as http:
            said = await http.post("/v1/kill", json={"run": "r"})
            assert said.json()["action"] == "stop"
        await served.daemon.stop()
        assert not path.exists()
