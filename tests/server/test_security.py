"""The daemon as a process: which addresses it serves, whom it lets in as what, and what tokens do (docs/security.md)."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from guardd_client import AsyncGuard, GuardRequestError, GuardUnavailable
from guardd_client.wire import Decoder, encode

from guardd.protocol.operations import OPERATIONS, ROLES
from guardd.server.audit import verify
from guardd.server.rpc import REFUSED_MAX
from tests.certificates import Authority
from tests.daemons import DaemonProcess, daemon
from tests.server.test_audit import PARAMS
from tests.servers import Server
from tests.test_cli import guardd

OPERATORS = ("--operator-socket", "FOLDER/operator.sock")
READY = "unix:FOLDER/operator.sock"


@pytest.fixture
async def served(embedded: Server, prefix: str) -> AsyncIterator[DaemonProcess]:
    """A daemon that takes tokens, with a socket for operators."""
    async with daemon(embedded.url, prefix, "--auth", "tokens", *OPERATORS, ready=READY) as running:
        yield running


def operators(served: DaemonProcess) -> str:
    return f"unix:{served.folder}/operator.sock"


async def make(served: DaemonProcess, role: str = "worker", **params: Any) -> dict[str, Any]:
    async with AsyncGuard(operators(served)) as operator:
        made: dict[str, Any] = await operator.call("token_new", {"role": role, **params})
        return made


async def refused(guard: AsyncGuard, method: str = "runs", **params: Any) -> str:
    with pytest.raises(GuardRequestError) as raised:
        await guard.call(method, params)
    return f"{raised.value.name} {raised.value.field}"


def audit(served: DaemonProcess) -> list[dict[str, Any]]:
    path = served.folder / "state" / "audit.jsonl"
    assert path.stat().st_mode & 0o777 == 0o600
    assert verify(path).line == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- Start-up ----------------------------------------------------------------------

ADDRESSES = ("unix:FOLDER/x.sock", "tcp://127.0.0.1:0", "tls://127.0.0.1:0", "tcp://0.0.0.0:0", "tls://0.0.0.0:0")


@pytest.mark.parametrize("auth", ["none", "tokens"])
@pytest.mark.parametrize("has_tls", [False, True])
@pytest.mark.parametrize("address", ADDRESSES)
async def test_only_loopback_is_served_without_tokens_and_tls(
    address: str, has_tls: bool, auth: str, embedded: Server, prefix: str, tmp_path: Path
) -> None:
    """Each refusal says what to add."""
    options = [*OPERATORS, "--auth", auth, "--listen", address]
    if has_tls:
        certificate, key = Authority.make(tmp_path).sign("guard.test")
        options += ["--tls-cert", str(certificate), "--tls-key", str(key)]
    is_served = (has_tls or "tls" not in address) and ("0.0.0.0" not in address or (has_tls and auth == "tokens"))
    if is_served:
        async with daemon(embedded.url, prefix, *options, ready=READY) as served:
            started = next(event for event in served.log() if event["event"] == "daemon.started")
            word = "tokens: callers have" if auth == "tokens" else "no tokens: everybody on"
            assert started["roles"].startswith(word) and "operator.sock is operator" in started["roles"]
            assert (served.folder / "operator.sock").stat().st_mode & 0o777 == 0o600
    else:
        code, said = await start_fails(embedded, *[o.replace("FOLDER", str(tmp_path)) for o in options])
        assert code == 2
        assert ("tls_cert" in said) if "tls" in address and not has_tls else ("--auth tokens --tls-cert" in said)


async def start_fails(store: Server, *options: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "guardd.cli.main", "serve", "--store", store.url, "--prefix", "nobody", *options,
        *([] if "--state-dir" in options else ["--state-dir", f"/tmp/gd-{os.getpid()}-{time.time_ns()}"]), stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, said = await asyncio.wait_for(process.communicate(), 20)
    return process.returncode, said.decode()


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_tokens_that_nobody_could_make_are_refused_at_start(
    workers: str, embedded: Server, prefix: str, tmp_path: Path
) -> None:
    options = (
        "--auth",
        "tokens",
        "--state-dir",
        str(tmp_path / "s"),
        "--listen",
        f"unix:{tmp_path}/d.sock",
        "--workers",
        workers,
    )
    code, said = await start_fails(embedded, *options, "--prefix", prefix)
    assert code == 2
    assert "--operator-socket .guardd/operator.sock" in said and "guardd token new --role operator" in said
    async with daemon(embedded.url, prefix, "--auth", "tokens", *OPERATORS, ready=READY) as served:
        text = (await make(served, "operator"))["token"]
    async with daemon(embedded.url, prefix, *OPERATORS, ready=READY) as served:
        assert text  # with an operator's token in the store the socket may be left out
    os.environ["GUARDD_TOKEN"] = text
    try:
        async with (
            daemon(embedded.url, prefix, "--auth", "tokens", "--workers", workers) as served,
            AsyncGuard(served.url) as guard,
        ):
            await guard.call("token_list", {})
    finally:
        del os.environ["GUARDD_TOKEN"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--auth", "maybe"), "none | tokens"), (("--tls-cert", "x.pem"), "set tls_cert and tls_key"),
        (("--tls-cert", "/nowhere/x.pem", "--tls-key", "/nowhere/x.key"), "cannot be used"),
        (("--listen", "unix:/tmp/open.sock"), "chmod go-w"), (("--operator-socket", "/tmp/open.sock"), "chmod go-w"),
    ],
)  # fmt: skip
async def test_what_is_open_or_half_said_is_refused_at_start(
    options: tuple[str, ...], sentence: str, embedded: Server, tmp_path: Path
) -> None:
    listen = () if "--listen" in options else ("--listen", f"unix:{tmp_path}/d.sock")
    code, said = await start_fails(embedded, *options, *listen, "--state-dir", str(tmp_path / "s"))
    assert (code, sentence in said) == (2, True), said


# ---- Who is let in ------------------------------------------------------------------


async def test_each_operation_over_the_wire_by_each_role(served: DaemonProcess) -> None:
    """The table decides; each attempt is in the audit, under the name of its token."""
    for role in ROLES:
        made = await make(served, role, name=f"a-{role}")
        for method, operation in OPERATIONS.items():
            if method in ("token_revoke", "token_new"):
                continue
            async with AsyncGuard(served.url, token=made["token"]) as guard:
                try:
                    await guard.call(
                        method, {**PARAMS[method], **({"run": f"{role}-{method}"} if "run" in PARAMS[method] else {})}
                    )
                    name = ""
                except GuardRequestError as error:
                    name = error.name
            assert (name == "not_allowed") == (ROLES.index(role) < ROLES.index(operation.role)), (role, method, name)
            await asyncio.sleep(0.03)  # ten refusals a second are written one by one
    await asyncio.sleep(2.2)
    lines = [e for e in audit(served) if e["outcome"] == "refused"]
    for role in ("reader", "worker"):
        mine = [e for e in lines if e["caller"].endswith(f"a-{role}")]
        too_high = [o for o in OPERATIONS.values() if ROLES.index(o.role) > ROLES.index(role)]
        told = len(mine) + sum(e.get("unwritten", 0) for e in mine)
        assert told == len([o for o in too_high if o.name not in ("token_new", "token_revoke")])
        assert {e["role"] for e in mine} == {role}


async def test_without_tokens_an_operator_socket_leaves_workers_on_the_other(embedded: Server, prefix: str) -> None:
    async with daemon(embedded.url, prefix, *OPERATORS) as served:
        async with AsyncGuard(served.url) as agent, AsyncGuard(operators(served)) as operator:
            await agent.run("r").before("t")
            assert await refused(agent, "kill", run="r") == "not_allowed role"
            assert await refused(agent, "freeze", run="r") == "not_allowed role"
            assert await refused(agent, "open", run="s", limits={"max_steps": 9999}) == "not_allowed limits.max_steps"
            await operator.call("kill", {"run": "r"})
            assert await refused(agent, "resume", run="r", change="human_input") == "not_allowed role"
        made = await make(served, "operator")
        async with AsyncGuard(served.url, token=made["token"]) as guard:
            assert (await guard.call("kill", {"run": "s"})).action == "stop"
        async with AsyncGuard(served.url, token="guardd_nonsense") as guard:
            assert await refused(guard) == "not_allowed token"


async def test_no_token_and_a_wrong_one_are_turned_away_and_closed(served: DaemonProcess) -> None:
    made = await make(served)
    secret = made["token"].split("_", 2)[2]
    wrong = f"guardd_{made['id']}_{secret[:-1]}{'A' if secret[-1] != 'A' else 'B'}"
    for text in (None, "", "x", wrong, f"guardd_{'0' * 12}_{secret}", made["token"] + "x"):
        hello = {"versions": [1], "client": "c"} | ({} if text is None else {"token": text})
        reader, writer = await asyncio.open_unix_connection(served.url.removeprefix("unix:"))
        writer.write(encode([0, 1, "hello", hello]))
        said = Decoder().receive_data(await reader.read(65_536))[0][2]
        assert (said["error"], said["field"]) == ("not_allowed", "token")
        assert secret not in json.dumps(said)
        assert await reader.read() == b""
        writer.close()
    assert {e["note"] for e in audit(served) if e["method"] == "hello"} == {"no token", "unknown token"}


async def test_requests_right_behind_hello_wait_for_it(served: DaemonProcess) -> None:
    made = await make(served)
    reader, writer = await asyncio.open_unix_connection(served.url.removeprefix("unix:"))
    hello = [0, 1, "hello", {"versions": [1], "client": "c", "token": made["token"]}]
    writer.write(encode(hello) + encode([0, 2, "runs", {}]) + encode([0, 3, "hello", hello[3]]))
    decoder, said = Decoder(), {}
    while len(said) < 3:
        said |= {reply[1]: reply for reply in decoder.receive_data(await reader.read(65_536))}
    assert said[1][3]["role"] == "worker"
    assert said[2][2] is None
    assert said[3][2]["message"].startswith("hello was said")
    writer.close()


async def test_a_prefix_is_a_wall(served: DaemonProcess) -> None:
    """Nothing of another prefix can be read, touched or listened to."""
    async with AsyncGuard(operators(served)) as operator:
        for run in ("team-a.1", "team-b.1"):
            await operator.run(run).before("t", idempotency_key="k")
        made = await make(served, run_prefix="team-a.")
        async with AsyncGuard(served.url, token=made["token"]) as guard:
            assert {run["run"] for run in await guard.call("runs", {})} == {"team-a.1"}
            assert {effect["run"] for effect in await guard.call("ledger", {})} == {"team-a.1"}
            for method in ("inspect", "trace", "watch", "open", "finish"):
                assert await refused(guard, method, run="team-b.1") == "not_allowed run"
                await guard.call(method, {"run": "team-a.1"})
        assert (await operator.call("inspect", {"run": "team-b.1"}))["status"] == "running"


async def test_a_revoked_token_ends_within_a_second(served: DaemonProcess) -> None:
    made, other = await make(served), await make(served)
    async with (
        AsyncGuard(served.url, token=made["token"]) as guard,
        AsyncGuard(served.url, token=other["token"]) as rest,
    ):
        await guard.call("runs", {})
        async with AsyncGuard(operators(served)) as operator:
            assert await operator.call("token_revoke", {"id": made["id"]}) == {"id": made["id"], "revoked": True}
            assert await operator.call("token_revoke", {"id": made["id"]}) == {"id": made["id"], "revoked": False}
        assert await refused(guard) == "not_allowed token"
        await rest.call("runs", {})


async def test_a_token_revoked_at_one_daemon_ends_at_the_others(
    embedded: Server, prefix: str, served: DaemonProcess
) -> None:
    """Within a second, several workers included; and a new one is known at once."""
    options = ("--auth", "tokens", *OPERATORS, "--workers", "2")
    async with daemon(embedded.url, prefix, *options, ready=READY) as two:
        made = await make(served)
        guards = [AsyncGuard(two.url, token=made["token"]) for _ in range(4)]
        for guard in guards:
            await guard.call("runs", {})
        await make_revoked(served, made["id"])
        await asyncio.sleep(1.1)
        for guard in guards:
            assert await refused(guard) == "not_allowed token"
            await guard.close()


async def make_revoked(served: DaemonProcess, token_id: str) -> None:
    async with AsyncGuard(operators(served)) as operator:
        await operator.call("token_revoke", {"id": token_id})


async def test_a_token_expires_on_an_open_connection(served: DaemonProcess) -> None:
    made = await make(served, expires_in_ms=1000)
    async with AsyncGuard(served.url, token=made["token"]) as guard:
        await guard.call("runs", {})
        await asyncio.sleep(max(0.0, made["expires_ms"] / 1000 - time.time()) + 0.05)
        assert await refused(guard) == "not_allowed token"
    async with AsyncGuard(operators(served)) as operator:
        assert [token["expired"] for token in await operator.call("token_list", {})] == [True]


async def test_tokens_that_cannot_be_read_let_nobody_in(prefix: str, tmp_path: Path) -> None:
    """A store that is gone for more than five seconds: a caller with a good token is refused, nothing is granted."""
    with Server.start(tmp_path) as server:
        async with daemon(server.url, prefix, "--auth", "tokens", *OPERATORS, ready=READY) as served:
            made = await make(served)
            async with AsyncGuard(served.url, token=made["token"], deadline_ms=1500) as guard:
                await guard.call("runs", {})
                server.kill()
                await asyncio.sleep(5.2)
                with pytest.raises(GuardUnavailable, match="store_unavailable"):
                    await guard.call("inspect", {"run": "r"})


async def test_a_peer_that_is_refused_for_ever_is_closed(served: DaemonProcess) -> None:
    made = await make(served)
    reader, writer = await asyncio.open_unix_connection(served.url.removeprefix("unix:"))
    writer.write(encode([0, 1, "hello", {"versions": [1], "client": "c", "token": made["token"]}]))
    for number in range(REFUSED_MAX + 50):
        writer.write(encode([0, number + 2, "kill", {"run": "r"}]))
    data = await asyncio.wait_for(reader.read(), 10)
    replies = Decoder().receive_data(data)
    assert REFUSED_MAX <= sum(reply[2] is not None for reply in replies) <= REFUSED_MAX + 50
    assert any(event["event"] == "connection.turned_away" for event in served.log())
    assert len([e for e in audit(served) if e["outcome"] == "refused"]) <= 30
    writer.close()


# ---- Secrets, audit, commands ----------------------------------------------------------


async def test_a_token_is_nowhere_but_with_its_owner(embedded: Server, prefix: str, served: DaemonProcess) -> None:
    """Not in the log, the audit, the store, an error; the store has its SHA-256."""
    made = await make(served, name="ci")
    async with AsyncGuard(served.url, token=made["token"]) as guard:
        await guard.run("r").before("t", {"n": 1})
        await refused(guard, "kill", run="r")
        await refused(guard, "kill", run="r", note=made["token"])
    async with AsyncGuard(served.url, token=made["token"][:-1]) as guard:
        await refused(guard)
    await make_revoked(served, made["id"])
    async with AsyncGuard(served.url, token=made["token"]) as guard:
        await refused(guard)
    await served.stop()
    secret = made["token"].split("_", 2)[2]
    texts = [path.read_text() for path in (served.folder / "daemon.log", served.folder / "state" / "audit.jsonl")]
    client = embedded.client()
    for key in client.keys(f"{prefix}:*"):
        kind = client.type(key)
        if kind in ("hash", "stream"):
            texts.append(str(client.hgetall(key) if kind == "hash" else client.xrange(key)))
    assert not [text for text in texts if secret in text]
    assert made["id"] in texts[1]


async def test_a_full_disk_refuses_what_permits_and_lets_stops_through(served: DaemonProcess) -> None:
    """/dev/full in the place of the audit file: the real error of a real write."""
    path = served.folder / "state" / "audit.jsonl"
    async with AsyncGuard(operators(served)) as operator:
        await operator.run("r").before("t")
        await operator.run("k").before("t")
        await operator.call("freeze", {"run": "r"})
        full = path.with_suffix(".full")
        full.symlink_to("/dev/full")
        full.replace(path)  # at once: the daemon would make a file that is missing
        for method, params in (("resume", {"run": "r", "change": "human_input"}), ("token_new", {"role": "operator"})):
            assert await refused(operator, method, **params) == "audit_unavailable audit"
        assert (await operator.call("inspect", {"run": "r"}))["freeze"] == "all"
        assert (await operator.call("kill", {"run": "k"})).action == "stop"
        newest = (await operator.call("audit", {"limit": 2}))[::-1]
        assert [(e["method"], e["outcome"]) for e in newest] == [("kill", "asked"), ("kill", "done")]
        path.unlink()
        assert (await operator.call("resume", {"run": "r", "change": "human_input"})).action == "continue"
    assert [e["method"] for e in audit(served)] == ["resume", "resume"]
    assert any(event["event"] == "audit.unwritten" for event in served.log())


async def test_the_commands_for_tokens_and_the_audit(served: DaemonProcess, tmp_path: Path) -> None:
    """The first token as the documentation shows it, then with a token alone."""

    def run(*arguments: str, code: int = 0, url: str = operators(served), **environment: str) -> str:
        done = guardd(*arguments, cwd=tmp_path, GUARDD_URL=url, **environment)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    text = run("token", "new", "--role", "operator", "--name", "ops").strip()
    worker = json.loads(run("token", "new", "--role", "worker", "--run-prefix", "a.", "--expires-in", "30d", "--json"))
    assert worker["expires_ms"] - worker["created_ms"] == 30 * 86_400_000
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(0o600)
    assert "ops" in run("token", "list", url=served.url, GUARDD_TOKEN_FILE=str(file))
    assert "not_allowed" in run("kill", "a.1", url=served.url, GUARDD_TOKEN=worker["token"], code=1)
    assert [t["role"] for t in json.loads(run("token", "list", "--json"))] == ["operator", "worker"]
    file.chmod(0o644)
    assert "chmod 600" in run("token", "list", url=served.url, GUARDD_TOKEN_FILE=str(file), code=2)
    assert run("token", "revoke", worker["id"]) == "revoked\n"
    assert "no token" in run("token", "revoke", worker["id"], code=1)
    assert "30d, 12h" in run("token", "new", "--role", "worker", "--expires-in", "soon", code=2)
    shown = run("audit")
    assert "token_revoke" in shown and "operator socket" in shown and text not in shown
    assert json.loads(run("audit", "--json", "--limit", "1"))[0]["method"] == "token_revoke"
    path = served.folder / "state" / "audit.jsonl"
    assert "unbroken" in run("audit", "--verify", str(path))
    changed = tmp_path / "changed.jsonl"
    changed.write_text(path.read_text().replace("token_new", "token_now", 1))
    assert json.loads(run("audit", "--verify", str(changed), "--json", code=1))["broken_line"] == 2
    run("audit", "--verify", str(tmp_path / "none"), code=2)
