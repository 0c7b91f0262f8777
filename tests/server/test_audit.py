"""The audit: before what permits, beside what stops, in two copies; its chain; its bounds (docs/security.md)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from guardd.engine.core import Engine
from guardd.model.errors import AuditUnavailable, GuardError, NotAllowed, StoreUnavailable
from guardd.model.limits import LIMITS, REFERENCE, first_looser
from guardd.protocol.operations import OPERATIONS, ROLES
from guardd.server.audit import REFUSED_PER_S_MAX, Audit, AuditFile, verify
from guardd.server.gate import Caller, Gate

MakeGuard = Callable[..., Engine]
OPERATOR, WORKER, READER = (Caller(role, role) for role in ("operator", "worker", "reader"))

PARAMS: dict[str, dict[str, Any]] = {
    "open": {"run": "r"}, "before": {"run": "r", "call": "c", "tool": "t"}, "after": {"run": "r", "call": "c", "status": "progress"},
    "renew": {"run": "r", "call": "c"}, "charge": {"run": "r", "op_id": "o"}, "settle": {"run": "r", "op_id": "o"},
    "handoff": {"run": "r", "op_id": "h", "from": "a", "to": "b"}, "checkpoint": {"run": "r", "version": 1},
    "finish": {"run": "r"}, "kill": {"run": "r"}, "freeze": {"run": "r"}, "resume": {"run": "r", "change": "human_input"},
    "resolve": {"run": "r", "tool": "t", "idempotency_key": "k", "state": "committed"}, "deny_rule": {"id": "i", "tool": "t"},
    "deny_rules": {}, "export": {"run": "r"}, "forget": {"run": "r"}, "inspect": {"run": "r"}, "runs": {}, "trace": {"run": "r"}, "ledger": {},
    "token_new": {"role": "worker"}, "token_list": {}, "token_revoke": {"id": "x"}, "audit": {}, "confirm": {},
}  # fmt: skip


class Guarded:
    """A gate whose audit file is in a folder of the test."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.path = folder / "audit.jsonl"
        self.audit = Audit(AuditFile(self.path), engine.audit_stream)
        self.gate = Gate(engine, self.audit)
        self.engine = engine

    async def ask(self, caller: Caller, method: str, **params: Any) -> Any:
        return await self.gate.call(caller, method, params)

    async def lines(self) -> list[dict[str, Any]]:
        await asyncio.gather(*self.audit._tasks, return_exceptions=True)
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []


@pytest.fixture
async def guarded(make_guard: MakeGuard, tmp_path: Path) -> Any:
    made = Guarded(make_guard(virtual_clock=False), tmp_path)
    yield made
    await made.audit.close()


def test_every_operation_is_asked_below() -> None:
    assert set(PARAMS) == set(OPERATIONS)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("method", PARAMS)
async def test_each_operation_is_for_its_role_and_those_above(method: str, role: Any, guarded: Guarded) -> None:
    """Made from the table: who may not is told which role is needed, and the attempt is written down."""
    caller = Caller(f"the {role}", role)
    is_allowed = ROLES.index(role) >= ROLES.index(OPERATIONS[method].role)
    try:
        await guarded.ask(caller, method, **PARAMS[method])
        error = ""
    except GuardError as raised:
        error = raised.name
        if error == "not_allowed":
            assert (raised.field, raised.value, raised.limit) == ("role", role, OPERATIONS[method].role)
            assert f"guardd token new --role {raised.limit}" in raised.message
    assert (error != "not_allowed") == is_allowed, error
    lines = await guarded.lines()
    if not is_allowed:
        assert [(e["caller"], e["role"], e["method"], e["outcome"]) for e in lines] == [
            (f"the {role}", role, method, "refused")
        ]
    elif OPERATIONS[method].role == "operator" and method not in ("audit", "token_list"):
        assert [e["outcome"] for e in lines] == ["asked", "failed" if error else "done"]
    else:
        assert [e["outcome"] for e in lines] in ([], ["asked", "done"])
    stored = await guarded.engine.audit_stream.newest(10)
    assert [{**e, "prev": ""} for e in reversed(stored)] == [{**e, "prev": ""} for e in lines]


BOUND = Caller("bound", "operator", "team-a.")


@pytest.mark.parametrize("method", PARAMS)
async def test_a_bound_caller_reaches_its_own_runs_only(method: str, guarded: Guarded) -> None:
    """Every operation that names a run; those for all runs are not for it; lists are narrowed."""
    params = PARAMS[method]
    if "run" in params:
        for run in ("r", "team-b.1", "xteam-a.", ""):
            with pytest.raises(NotAllowed) as raised:
                await guarded.ask(BOUND, method, **{**params, "run": run})
            assert (raised.value.field, raised.value.limit) == ("run", "team-a....")
        try:
            await guarded.ask(BOUND, method, **{**params, "run": "team-a.1"})
        except GuardError as error:
            assert error.name != "not_allowed"
        assert [e["outcome"] for e in await guarded.lines()][:4] == ["refused"] * 4
    elif method in ("runs", "ledger"):
        for run in ("team-a.1", "team-b.1"):
            await guarded.ask(OPERATOR, "before", run=run, call="c", tool="t", idempotency_key="k")
        assert {e["run"] for e in await guarded.ask(BOUND, method)} == {"team-a.1"}
        assert await guarded.ask(BOUND, method, run_prefix="team-a.2") == []
        assert {e["run"] for e in await guarded.ask(OPERATOR, method)} == {"team-a.1", "team-b.1"}
        with pytest.raises(NotAllowed, match="under its prefix"):
            await guarded.ask(BOUND, method, run_prefix="team-b.")
    else:
        with pytest.raises(NotAllowed, match="for all runs"):
            await guarded.ask(BOUND, method, **params)


async def test_a_bound_caller_takes_no_global_key_of_its_own_choice(make_guard: MakeGuard, tmp_path: Path) -> None:
    """It would reach the effects of others; a tool rule may say that a key is global."""
    guarded = Guarded(make_guard(tools={"refund": {"effect_scope": "global"}}, virtual_clock=False), tmp_path)
    ask = {"run": "team-a.1", "call": "c", "idempotency_key": "k", "scope": "global"}
    with pytest.raises(NotAllowed, match="beyond the prefix"):
        await guarded.ask(BOUND, "before", tool="pay", **ask)
    assert (await guarded.ask(BOUND, "before", tool="refund", **ask)).action == "execute"
    await guarded.audit.close()


async def test_a_worker_settles_only_where_the_rule_says_verify(make_guard: MakeGuard, tmp_path: Path) -> None:
    guarded = Guarded(make_guard(tools={"look": {"verify": True}}, virtual_clock=False), tmp_path)
    answer = await guarded.ask(WORKER, "resolve", **{**PARAMS["resolve"], "tool": "look"})
    assert answer.action == "continue"
    for caller, tool in ((WORKER, "pay"), (READER, "look")):
        with pytest.raises(NotAllowed):
            await guarded.ask(caller, "resolve", **{**PARAMS["resolve"], "tool": tool})
    assert [e["outcome"] for e in await guarded.lines()] == ["asked", "done", "refused", "refused"]
    await guarded.audit.close()


async def test_wider_limits_are_written_down_and_refused_to_workers(guarded: Guarded) -> None:
    wide, tight = {"max_steps": 10_000}, {"max_steps": 2}
    with pytest.raises(NotAllowed):
        await guarded.ask(WORKER, "open", run="r", limits=wide)
    await guarded.ask(OPERATOR, "open", run="s", limits=tight)
    await guarded.ask(OPERATOR, "open", run="u", limits=wide)
    seen = [(e["caller"], e["subject"], e["outcome"]) for e in await guarded.lines()]
    assert seen == [("worker", "r", "refused"), ("operator", "u", "asked"), ("operator", "u", "done")]


@pytest.mark.parametrize("name", LIMITS)
async def test_what_counts_as_wider_is_what_the_script_says(name: str, guarded: Guarded) -> None:
    """The audit asks the same question as lua/include/limits.lua."""
    limit = LIMITS[name]
    values = limit.words or tuple(v for v in (limit.min, limit.max, 3, None) if v is not None or limit.may_be_unlimited)
    for number, value in enumerate(values):
        if isinstance(value, int) and not limit.min <= value <= limit.max:
            continue
        try:
            await guarded.ask(WORKER, "open", run=f"{name}-{number}", limits={name: value})
            is_refused = False
        except NotAllowed:
            is_refused = True
        assert (first_looser(REFERENCE.limits, {name: value}) is not None) == is_refused, (name, value)


PERMITTING = [
    ("resume", PARAMS["resume"]), ("resolve", PARAMS["resolve"]), ("forget", PARAMS["forget"]), ("token_new", {"role": "worker"}),
    ("token_revoke", {"id": "x"}), ("deny_rule", {"id": "i", "remove": True}), ("open", {"run": "u", "limits": {"max_steps": 9999}}),
    ("freeze", {"run": "r", "scope": "retries"}),
]  # fmt: skip
STOPPING = [
    ("kill", {"run": "r"}), ("freeze", {"run": "r"}), ("finish", {"run": "r"}), ("deny_rule", {"id": "i", "tool": "t"}),
]  # fmt: skip


@pytest.mark.parametrize("broken", ["file", "store"])
@pytest.mark.parametrize(("method", "params"), PERMITTING)
async def test_what_permits_something_needs_both_copies(
    method: str, params: dict[str, Any], broken: str, guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is never asked; the refusal says what to mend."""
    await guarded.ask(WORKER, "before", **PARAMS["before"])
    await guarded.engine.rules.read()
    asked = break_copy(broken, guarded, monkeypatch)
    with pytest.raises(AuditUnavailable, match="nothing was done.*mend it"):
        await guarded.ask(OPERATOR, method, **params)
    assert asked == []


@pytest.mark.parametrize("broken", ["file", "store"])
@pytest.mark.parametrize(("method", "params"), STOPPING)
async def test_what_stops_something_needs_only_one(
    method: str, params: dict[str, Any], broken: str, guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or a store without room must not keep a run alive."""
    await guarded.ask(WORKER, "before", **PARAMS["before"])
    await guarded.engine.rules.read()
    asked = break_copy(broken, guarded, monkeypatch)
    assert (await guarded.ask(OPERATOR, method, **params)).action in ("stop", "wait", "continue")
    assert asked == [method]


async def test_a_rule_that_takes_the_place_of_another_permits_something(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    await guarded.ask(OPERATOR, "deny_rule", id="i", tool="*")
    break_copy("file", guarded, monkeypatch)
    with pytest.raises(AuditUnavailable):
        await guarded.ask(OPERATOR, "deny_rule", id="i", tool="nothing")


async def test_without_any_copy_nothing_is_done(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = break_copy("file", guarded, monkeypatch) + break_copy("store", guarded, monkeypatch)
    with pytest.raises(AuditUnavailable):
        await guarded.ask(OPERATOR, "kill", run="r")
    assert asked == []


@pytest.mark.parametrize(("broken", "retry"), [("file", "later"), ("store", "same_id")])
async def test_only_a_store_out_of_reach_is_worth_sending_the_same_again(
    broken: str, retry: str, guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that restarts is back in a second: a client that opens a run with limits must not fail for that."""
    break_copy(broken, guarded, monkeypatch)
    with pytest.raises(AuditUnavailable) as refused:
        await guarded.ask(OPERATOR, "open", run="r", limits={"max_steps": 1000})
    assert refused.value.as_dict()["retry"] == retry


def break_copy(broken: str, guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Breaks one copy; returns what the engine is asked from now on."""
    asked: list[str] = []
    real = guarded.engine.call

    async def call(method: str, params: Any, **options: Any) -> Any:
        asked.append(method)
        return await real(method, params, **options)

    async def no_store(_: Any) -> None:
        raise StoreUnavailable("the store is out of reach", field="store")

    def no_disk(_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(guarded.engine, "call", call)
    if broken == "file":
        monkeypatch.setattr(guarded.audit._file, "append", no_disk)
    else:
        monkeypatch.setattr(guarded.audit.stream, "add", no_store)
    return asked


async def test_a_refused_caller_cannot_fill_the_disk(guarded: Guarded) -> None:
    """Ten lines a second; how many were left out stands in the next one."""
    for _ in range(60):
        with pytest.raises(NotAllowed):
            await guarded.ask(WORKER, "kill", run="r")
    lines = await guarded.lines()
    assert len(lines) <= 2 * REFUSED_PER_S_MAX
    await asyncio.sleep(1.1)
    await guarded.audit.flush()
    lines = await guarded.lines()
    assert len(lines) + sum(e.get("unwritten", 0) for e in lines) == 60


async def test_no_secret_reaches_the_audit(guarded: Guarded) -> None:
    """Not in a note, a run, a key, a value; only the id of a token."""
    made = await guarded.ask(OPERATOR, "token_new", role="worker", name="w")
    secret = made["token"]
    for params in (
        {"run": "r", "note": f"use {secret} and sk-live-4eC39HqLyjWDarjtT1zdp7dc"}, {"run": secret}, {"run": "r", "reason": secret},
        {"run": f"{secret} {secret}"},
    ):  # fmt: skip
        with contextlib.suppress(GuardError):
            await guarded.ask(OPERATOR, "kill", **params)
    await guarded.ask(
        OPERATOR, "resolve", run="r", tool="t", idempotency_key="order-17", state="committed", value={"pin": "hunter2"}
    )
    text = guarded.path.read_text() + json.dumps(await guarded.engine.audit_stream.newest(50))
    for word in (secret, secret.split("_", 2)[2], "order-17", "hunter2", "4eC39HqLyjWDarjtT1zdp7dc"):
        assert word not in text
    assert made["id"] in text


def test_a_line_that_was_changed_taken_out_or_put_in_is_found(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    file = AuditFile(path)
    for number in range(5):
        file.append({"n": number, "note": "ü"})
    assert path.stat().st_mode & 0o777 == 0o600
    good = path.read_text().splitlines(keepends=True)
    assert (verify(path).lines, verify(path).line) == (5, 0)
    for lines, broken in (
        ([good[0], good[1].replace('"n": 1', '"n": 7'), *good[2:]], 3), ([good[0], *good[2:]], 2), (good[1:], 1),
        ([*good[:2], good[1], *good[2:]], 3), ([*good[:2], "\n", *good[2:]], 3), ([*good[:2], "[]\n"], 3),
    ):  # fmt: skip
        path.write_text("".join(lines))
        assert verify(path).line == broken


def test_a_line_cut_off_by_a_crash_is_shown_and_the_chain_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    AuditFile(path).append({"n": 0})
    with path.open("a") as file:
        file.write('{"n": 1, "pr')
    AuditFile(path).append({"n": 2})
    assert verify(path).line == 2
    assert json.loads(path.read_text().splitlines()[-1])["n"] == 2


def test_a_full_disk_leaves_the_lines_that_are_whole(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        AuditFile(Path("/dev/full")).append({"n": 0})


def _append(path: str, count: int) -> None:
    for number in range(count):
        AuditFile(Path(path)).append({"n": number})


def test_several_processes_write_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_append, args=(str(path), 50)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert (verify(path).lines, verify(path).line) == (150, 0)
