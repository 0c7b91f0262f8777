"""What an export holds and does not; stories whose ledger or limits changed outside of the trace play all the same."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from guardd_client import AsyncGuard

from tests.cli.test_incidents import FREE, exported, guardd
from tests.daemons import DaemonProcess, daemon
from tests.servers import Server
from tests.unit.test_redaction import SECRETS

RULES = """
[tools.charge]
effect_key = ["card"]
redact = ["card", "diary"]
"""
HIDDEN = "dear diary, it rained"


@pytest.fixture
async def served(embedded: Server, prefix: str, tmp_path: Path) -> AsyncIterator[DaemonProcess]:
    (tmp_path / "guardd.toml").write_text(RULES, encoding="utf-8")
    async with daemon(embedded.url, prefix, "--config", str(tmp_path / "guardd.toml")) as running:
        yield running


# ---- Redaction -------------------------------------------------------------------------


async def test_no_member_of_an_export_holds_a_secret(served: DaemonProcess, tmp_path: Path) -> None:
    """Keys, ids of operations, notes, references, names: whatever a client or a person may write."""
    async with AsyncGuard(served.url) as guard:
        run = guard.run("r", limits={**FREE, "max_same_call": None, "max_steps": None})
        for number, secret in enumerate(SECRETS):
            line = secret.replace("\n", " ")
            answer = await run.before("send", {"n": number}, agent=f"a {line}"[:255], idempotency_key=f"k {line}"[:255])
            await run.after(answer["call"], "progress", value=1, operation_id=f"tx {line}"[:255])
            await guard.call("checkpoint", {"run": "r", "op_id": f"c{number}", "version": number, "ref": f"at {line}"})
            await guard.call("freeze", {"run": "r", "scope": "retries", "note": f"saw {line}"})
    file = await exported(served, "r", tmp_path)
    text = file.read_text(encoding="utf-8")
    assert [secret for secret in SECRETS if secret.replace("\n", " ") in text] == []
    assert "0 failing" in await guardd("replay", file)
    made = await guardd("scenario", "from-trace", file)
    assert [secret for secret in SECRETS if secret.replace("\n", " ") in made] == []


async def test_a_store_of_originals_is_exported_without_them(embedded: Server, prefix: str, tmp_path: Path) -> None:
    """`trace_originals` is for the store; a cut may be inside a secret, so what was cut stays there too."""
    (tmp_path / "guardd.toml").write_text(RULES, encoding="utf-8")
    async with (
        daemon(embedded.url, prefix, "--trace-originals", "--config", str(tmp_path / "guardd.toml")) as served,
        AsyncGuard(served.url) as guard,
    ):
        run = guard.run("r", agent="a", limits={**FREE, "max_same_call": None, "max_steps": None})
        for secret in SECRETS:
            await run.before("send", {"text": f"use {secret} now", "password": "hunter2"})
        await run.before("charge", {"card": "mine", "diary": HIDDEN})
        await run.before("charge", {"card": "yours", "diary": HIDDEN + "x" * 3000})
        stored = json.dumps(await guard.call("trace", {"run": "r"}))
        file = await exported(served, "r", tmp_path)
    assert "hunter2" in stored
    assert HIDDEN in stored
    text = file.read_text(encoding="utf-8")
    assert [secret for secret in (*SECRETS, "hunter2", HIDDEN, '\\"mine\\"', '\\"yours\\"') if secret in text] == []
    assert "0 failing" in await guardd("replay", file)


# ---- What happened outside of the trace ------------------------------------------------


async def looked_up(guard: AsyncGuard) -> None:
    """An operator looks effects up: one had happened, one had not and is done now."""
    run = guard.run("r", agent="a", limits=FREE)
    for key, state in (("k1", "committed"), ("k2", "not_executed")):
        answer = await run.before("pay", {"n": key}, idempotency_key=key)
        await run.after(answer["call"], "retryable")
        assert (await run.before("pay", {"n": key}, idempotency_key=key)).reason == "in_doubt"
        effect = {"run": "r", "tool": "pay", "idempotency_key": key}
        await guard.call("resolve", {**effect, "state": state, "value": 1, "note": "seen"})
    assert (await run.before("pay", {"n": "k1"}, idempotency_key="k1")).action == "replay"
    assert (await run.before("pay", {"n": "k2"}, idempotency_key="k2")).action == "execute"


async def another_run(guard: AsyncGuard) -> None:
    """Global keys that another run holds: in flight, then done; given up; left in doubt; of other arguments."""
    run, other = guard.run("r", agent="a", limits=FREE), guard.run("other", agent="o", limits=FREE)

    async def ask(who: Any, key: str, **args: Any) -> Any:
        return await who.before("pay", args, idempotency_key=key, scope="global")

    for key, status, then in (
        ("k1", "progress", "replay"),
        ("k2", "invalid_input", "execute"),
        ("k3", "fatal", "deny"),
    ):
        held = await ask(other, key, n=key)
        assert (await ask(run, key, n=key)).reason == "in_flight"
        await guard.call("after", {"run": "other", "call": held["call"], "status": status})
        assert (await ask(run, key, n=key)).action == then
        assert (await ask(run, key, n=key)).action == {"execute": "wait"}.get(then, then)
    other = guard.run("other2", agent="o", limits=FREE)
    for key, seen in (("k4", "committed"), ("k5", "conflict")):
        held = await ask(other, key, n=key)
        await other.after(held["call"], "progress")
        answer = await ask(run, key, n=key if seen == "committed" else "changed")
        assert answer.reason == ("already_committed" if seen == "committed" else "key_conflict")


async def raised(guard: AsyncGuard) -> None:
    """A run that nobody opened reaches a cap of the policy, and gets more."""
    for number in range(61):
        params = {"run": "r", "call": f"c{number}", "tool": "look", "args": {"n": number}}
        answer = await guard.call("before", params)
    assert answer.reason == "step_cap"
    await guard.call("resume", {"run": "r", "change": "limits_raised", "limits": {"max_steps": 100}, "note": "n"})
    assert (await guard.call("before", {**params, "call": "more"})).action == "execute"


async def opened_late(guard: AsyncGuard) -> None:
    """Limits that were set after a call: the calls before them were judged by the policy's."""
    for number in range(3):
        answer = await guard.call("before", {"run": "r", "call": f"c{number}", "tool": "look", "args": {"n": number}})
        assert answer.action == "execute"
    await guard.call("open", {"run": "r", "limits": {"max_steps": 2}})
    answer = await guard.call("before", {"run": "r", "call": "c9", "tool": "look", "args": {"n": 9}})
    assert (answer.action, answer.reason) == ("stop", "step_cap")


@pytest.mark.parametrize("story", [looked_up, another_run, raised, opened_late])
async def test_what_the_trace_does_not_tell_is_played(story: Any, served: DaemonProcess, tmp_path: Path) -> None:
    async with AsyncGuard(served.url) as guard:
        await story(guard)
    file = await exported(served, "r", tmp_path)
    said = await guardd("replay", file)
    assert "r  plays as it was: " in said
    made = tmp_path / "r.scenario.json"
    await guardd("scenario", "from-trace", file, "-o", made)
    assert "1 scenarios, 0 failing" in await guardd("replay", made, "--through-daemon")
