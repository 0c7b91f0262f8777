"""Every script keeps its contract: header, subset, stub, keys in one slot, wrong-type keys, numbers at 2^53 - 1."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Any

import pytest

from guardd.engine.core import Engine
from guardd.keys import Key, Keys
from guardd.model.errors import ERRORS, GuardError, StoreUnavailable
from guardd.scripts import loader, stubs
from guardd.store.connect import OpenedStore

NAMES = loader.script_names()
EXACT_MAX = 2**53 - 1


@pytest.mark.parametrize("name", NAMES)
def test_the_header_holds(name: str) -> None:
    """The loader checks header, includes and subset; errors are known; a commit, kill or renewal works in full memory."""
    script = loader.load(name)
    known = {f"GUARD_{each.upper()}" for each in ERRORS}
    assert set(script.errors) <= known
    named = set(re.findall(r'"(GUARD_[A-Z_]+)', (loader.lua_root() / f"{name}.lua").read_text()))
    assert named <= set(script.errors), f"{name}.lua raises what its header does not name"
    grants = {"open", "before", "charge", "handoff", "claim"}
    assert (script.flags == ()) == (name in grants), "what grants needs memory; what records must not"


@pytest.mark.parametrize("name", NAMES)
def test_every_include_is_used(name: str) -> None:
    """An include that nothing uses is dead weight in every call."""
    source = (loader.lua_root() / f"{name}.lua").read_text()
    maps = any(slot.type == "map" for slot in loader.load(name).args)
    for include in re.findall(r"^--@include (\w+)$", source, re.MULTILINE):
        code = "\n".join(line for line in source.splitlines() if not line.startswith("--"))
        is_used = re.search(rf"\b{include}\.", code) or (include == "pack" and maps)
        assert is_used, f"{name}.lua does not use include/{include}.lua"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("-- KEYS[1]", "-- KEYS[2]"), "stands where"),
        (lambda text: text.replace("op_key      hash", "op_key      blob"), "unknown type"),
        (lambda text: text.replace("-- FLAGS", "-- FLAG"), "lacks"),
        (lambda text: text.replace("--@bind", ""), "no --@bind"),
        (lambda text: text.replace("local op =", "local x = cjson.decode('1')\nlocal op ="), "subset"),
        (lambda text: text.replace("local op =", "local x = KEYS[1]\nlocal op ="), "header only"),
        (lambda text: text.replace("--@include clock", "--@include nothing"), "does not exist"),
        (lambda text: text.replace("EXPIRES op_key", "EXPIRES key"), "says nothing of op_key"),
        (lambda text: text.replace("-- extend:", "-- expand:"), "first line"),
    ],
)
def test_a_broken_header_is_refused(change: Any, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A contract that is not checked rots."""
    root = loader.lua_root()
    (tmp_path / "include").symlink_to(root / "include")
    (tmp_path / "extend.lua").write_text(change((root / "extend.lua").read_text()))
    monkeypatch.setattr(loader, "lua_root", lambda: tmp_path)
    with pytest.raises(loader.ScriptError, match=message):
        loader.load.__wrapped__("extend")


def test_a_stub_that_disagrees_fails_at_import() -> None:
    """Order, names and types are those of the header."""
    with pytest.raises(loader.ScriptError, match="disagree"):

        @stubs.script("extend")
        def wrong(*, op_key: Key, owner: str, now_ms: int | None, lease_ms: int) -> None: ...


def test_a_line_of_a_server_error_is_found_in_its_file() -> None:
    """Error messages count lines of the assembled text."""
    script = loader.load("before")
    line = next(i for i, text in enumerate(script.text.splitlines(), 1) if text.startswith("function window.count"))
    assert script.locate(line).startswith("include/window.lua:")
    assert script.locate(10**6) == "before.lua:?"


def test_all_keys_of_a_tree_are_in_one_slot() -> None:
    """One hash tag, the root's id; nothing of a run id can change it."""
    keys = Keys("guardd")
    tags = {
        re.search(r"\{([^}]*)\}", key)[1]  # type: ignore[index]
        for key in (
            *keys.chain("r1/a/b"),
            keys.marks("r1/a"),
            keys.calls("r1/a"),
            keys.trace("r1"),
            keys.op("r1/a", "d"),
        )
    }
    assert tags == {"r1"}
    assert keys.run("r1/a") == "guardd:{r1}/a:run"
    assert keys.global_op("d") == "guardd:{op:d}:op"


OPERATIONS: dict[str, dict[str, Any]] = {
    "open": {}, "before": {"call": "c2", "tool": "t", "idempotency_key": "k2"}, "kill": {}, "finish": {}, "freeze": {},
    "after": {"call": "c1", "status": "progress"}, "renew": {"call": "c1"}, "charge": {"op_id": "o2"},
    "settle": {"op_id": "o1"}, "handoff": {"op_id": "o3", "from": "a", "to": "b"}, "checkpoint": {"version": 1},
    "resume": {"change": "human_input"}, "resolve": {"tool": "t", "idempotency_key": "k9", "state": "committed"},
}  # fmt: skip


async def snapshot(opened: OpenedStore, prefix: str) -> dict[bytes, bytes]:
    (keys,) = await opened.store.execute(("KEYS", f"{prefix}:*"))
    dumped = await opened.store.execute(*(("DUMP", key) for key in keys)) if keys else []
    return dict(zip(keys, dumped, strict=True))


SCRIPT_OF = {"kill": "stop", "finish": "stop"}
BROKEN = [
    (op, slot.name.removesuffix("_key").removesuffix("_keys"))
    for op in OPERATIONS
    for slot in loader.load(SCRIPT_OF.get(op, op)).keys
]


@pytest.mark.parametrize(("op", "broken"), BROKEN)
async def test_a_key_of_a_wrong_type_changes_nothing(
    op: str, broken: str, real: Any, prefix: str, make_real: Any
) -> None:
    """SPEC 5: a script is not rolled back, so it must fail before its first write."""
    guard: Engine = make_real()
    await guard.call("before", {"run": "r", "call": "c1", "tool": "t", "idempotency_key": "k1", "at_ms": 0})
    await guard.call("charge", {"run": "r", "op_id": "o1", "reserve": {"tokens": 1}, "at_ms": 0})
    keys = guard.context.keys
    digest = guard.context.shaper.record("r", "t", {"before": "k2", "resolve": "k9"}.get(op, "k1"), "run").digest
    key = {"run": keys.run("r"), "marks": keys.marks("r"), "calls": keys.calls("r"), "trace": keys.trace("r"),
           "op": keys.op("r", digest)}[broken]  # fmt: skip
    await real.execute(("DEL", key), ("SET", key, "not what it should be"))
    opened = OpenedStore(real, None, "")
    before = await snapshot(opened, prefix)
    try:
        await guard.call(op, {"run": "r", "at_ms": 5, **OPERATIONS[op]})
    except StoreUnavailable as error:
        assert "WRONGTYPE" in error.message
        after = await snapshot(opened, prefix)
        for index in (f"{prefix}:runs", f"{prefix}:doubt"):  # plain commands of the same pipeline, hints only
            before.pop(index.encode(), None)
            after.pop(index.encode(), None)
        assert after == before
    except GuardError:
        pass  # the operation never got as far as that key
    else:
        (value,) = await real.execute(("GET", key))
        assert value == b"not what it should be", "an operation that does not need the key left it alone"


async def test_counters_keep_every_digit_up_to_2_53(make_guard: Any) -> None:
    """SPEC 2.10: amounts are whole numbers to 2^53 - 1; a sum beyond it stays at the bound."""
    guard = make_guard(limits={"max_wall_ms": None})
    big = EXACT_MAX - 1
    at = {"run": "r", "at_ms": EXACT_MAX - 10}
    await guard.call("charge", {**at, "op_id": "a", "usage": {"tokens": big, "cost_micros": 1_000_000_000_000_001}})
    state = await guard.call("inspect", {"run": "r"})
    assert state["counters"]["tokens"] == big
    assert state["counters"]["cost_micros"] == 1_000_000_000_000_001
    assert state["started_ms"] == EXACT_MAX - 10
    await guard.call("charge", {**at, "op_id": "b", "usage": {"tokens": big}})
    assert (await guard.call("inspect", {"run": "r"}))["counters"]["tokens"] == EXACT_MAX
    answer = await guard.call("before", {**at, "call": "c", "tool": "t", "progress_version": EXACT_MAX})
    assert answer.action == "execute"
    assert (await guard.call("inspect", {"run": "r"}))["progress"]["version"] == EXACT_MAX


async def test_scripts_survive_a_flushed_cache(make_guard: Any, opened: OpenedStore) -> None:
    """The script cache is volatile: restart, failover, SCRIPT FLUSH."""
    guard = make_guard()
    for number in range(3):
        await opened.store.execute(("SCRIPT", "FLUSH"))
        answer = await guard.call(
            "before", {"run": f"r{secrets.token_hex(2)}", "call": f"c{number}", "tool": "t", "at_ms": 0}
        )
        assert (answer.action, answer.step) == ("execute", 1)
