"""F9: a script that fails between any two of its writes, and keys of a wrong type under every script.

The server rolls nothing back. So each write of each script is failed once, at every step of one story; the request is
then sent again, as a client does, and the story goes on. Whatever was half written must be finished by that: the same
answers, each effect given out once, the same ledger, counts at most too high.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from guardd.engine.core import Engine
from guardd.model.errors import GuardError
from guardd.scripts.loader import Script, load, lua_root, script_names
from guardd.store.base import Command, Store
from tests.fault.rows import Row
from tests.fault.story import STORY, Step, make_guard

WRITES = ("HSET", "HDEL", "XADD", "PEXPIRE", "PERSIST", "PUBLISH", "ZADD", "ZREM", "DEL")
COUNTED = re.compile(
    r"^(steps|denied|no_progress|handoffs|stopped|round|resume_no|progress_no|tokens|model_calls|cost_micros"
    r"|held_\w+)$"
)
"""Fields of a run that may be too high after a script was cut short."""
SCRIPTS_MAX, WRITES_MAX = 20, 16


# ---- A store that cuts scripts short -----------------------------------------------------


def cut_short(script: Script, write: int) -> Script:
    """The script, ending in an error right after its write of this number, at the line that wrote."""
    names = " ".join(WRITES)
    head = (
        f"local cut_n, cut_real = 0, redis.call local function cut_call(name, ...) local reply = cut_real(name, ...) "
        f'if string.find(" {names} ", " " .. name .. " ", 1, true) then cut_n = cut_n + 1 '
        f'if cut_n == {write} then error("CUT SHORT", 2) end end return reply end '
    )
    return replace(script, name=f"{script.name}~{write}", text=head + script.text.replace("redis.call(", "cut_call("))


@dataclass
class Breaking:
    """A store whose scripts can be made to fail.

    scripts: those run since `begin`. is_cut: the script that was armed did end in the error; line: where.
    """

    store: Store
    scripts: list[tuple[str, Sequence[str]]] = field(default_factory=list)
    armed: tuple[int, int] | None = None
    is_cut: bool = False
    has_failed: bool = False
    lines: set[str] = field(default_factory=set)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def begin(self, armed: tuple[int, int] | None) -> None:
        self.scripts, self.armed, self.is_cut = [], armed, False

    async def script(
        self, script: Script, keys: Sequence[str], args: Sequence[Any], *, before: Sequence[Command] = ()
    ) -> Any:
        """Runs it, cut short when it is the armed one."""
        self.scripts.append((script.name, keys))
        if self.armed is None or self.armed[0] != len(self.scripts):
            return await self.store.script(script, keys, args, before=before)
        broken = cut_short(script, self.armed[1])
        try:
            return await self.store.script(broken, keys, args, before=before)
        except GuardError as error:
            found = re.search(r"user_script:(\d+): CUT SHORT", str(error.__cause__))
            assert found, f"{script.name} failed by itself: {error.__cause__}"
            self.is_cut = True
            self.lines.add(script.locate(int(found[1]) - 1))
            raise


ACCEPTED = {
    "withdraw: 'unknown' instead of 'withdrawn'",
    "resolve: 'error unknown_operation' instead of 'continue'",
}
"""A withdrawal is not sent again; cut short, the id is known as withdrawn and counts stay too high.
A resolution that stands is not made twice (SPEC 2.6)."""


@dataclass
class Played:
    """What a story came to: answers by step, runs, ledger records, and keys that live for ever though they should not."""

    said: dict[str, str]
    runs: dict[str, dict[str, str]]
    ledger: dict[str, dict[str, str]]
    immortal: set[str]


async def again(guard: Engine, act: Step) -> str:
    """The same request once more."""
    try:
        return str(await act(guard))
    except GuardError as error:
        return f"error {error.name}"


async def read(store: Store, prefix: str) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]], set[str]]:
    runs: dict[str, dict[str, str]] = {}
    ledger: dict[str, dict[str, str]] = {}
    keys = await store.scan(f"{prefix}:*")
    expiries = await store.execute(*[("PTTL", key) for key in keys])
    hashes = [key.decode() for key in keys if key.endswith(b":run") or b":op" in key.removeprefix(prefix.encode())]
    for key, flat in zip(hashes, await store.execute(*[("HGETALL", key) for key in hashes]), strict=True):
        fields = {flat[i].decode(): flat[i + 1].decode() for i in range(0, len(flat), 2)}
        (runs if key.endswith(":run") else ledger)[key.removeprefix(prefix)] = fields
    immortal = {key.decode().removeprefix(prefix) for key, ttl_ms in zip(keys, expiries, strict=True) if ttl_ms == -1}
    return runs, ledger, immortal


@dataclass
class Harm:
    """What is done at one step: arms a script's write, or breaks a key before it and mends it after."""

    at: str
    cut: tuple[int, int] | None = None
    key: str = ""


async def play(breaking: Breaking, prefix: str, harm: Harm | None = None) -> Played:
    """Plays the story; at the harmed step the request is sent again when it failed."""
    guard = make_guard(breaking, prefix)
    said: dict[str, str] = {}
    for name, act in STORY.items():
        is_here = harm is not None and harm.at == name
        if is_here and harm and harm.cut:
            breaking.begin(harm.cut)
        if is_here and harm and harm.key:
            await spoil(breaking.store, harm.key)
        failed = False
        try:
            said[name] = await act(guard)
        except GuardError as error:
            failed, said[name] = True, f"error {error.name}"
        if is_here:
            breaking.armed, breaking.has_failed = None, failed
            if harm and harm.key:
                await mend(breaking.store, harm.key)
            if failed:
                said[name] = await again(guard, act)
    runs, ledger, immortal = await read(breaking.store, prefix)
    keys = await breaking.store.scan(f"{prefix}:*")
    await breaking.store.execute(*[("UNLINK", key) for key in keys])
    return Played(said, runs, ledger, immortal)


async def spoil(store: Store, key: str) -> None:
    """Puts a string in the place of a key."""
    (there,) = await store.execute(("EXISTS", key))
    if there:
        await store.execute(("RENAME", key, f"{key}:aside"))
    await store.execute(("SET", key, "no such type"))


async def mend(store: Store, key: str) -> None:
    """Puts what was there back; nothing may have been written over the string."""
    (value,) = await store.execute(("GET", key))
    assert value == b"no such type"
    await store.execute(("DEL", key))
    (there,) = await store.execute(("EXISTS", f"{key}:aside"))
    if there:
        await store.execute(("RENAME", f"{key}:aside", key))


def differences(clean: Played, harmed: Played) -> list[str]:
    """What a repeat did not finish."""
    found = []
    for name, answer in clean.said.items():
        if harmed.said[name] != answer:
            found.append(f"{name}: {harmed.said[name]!r} instead of {answer!r}")
    found = [each for each in found if each not in ACCEPTED]
    for key in clean.ledger.keys() | harmed.ledger.keys():
        was, now = clean.ledger.get(key, {}), harmed.ledger.get(key, {})
        for name in was.keys() | now.keys():
            if name not in ("reclaimed", "awaited_ms") and was.get(name) != now.get(name):
                found.append(f"{key} {name}: {now.get(name)!r} instead of {was.get(name)!r}")
    for key in clean.runs.keys() | harmed.runs.keys():
        was, now = clean.runs.get(key, {}), harmed.runs.get(key, {})
        for name in was.keys() | now.keys():
            if COUNTED.match(name):
                if int(now.get(name, 0)) < int(was.get(name, 0)):
                    found.append(f"{key} {name}: {now.get(name)} is less than {was.get(name)}")
            elif name in ("status", "reason", "ended_by", "policy", "limits", "checkpoint_version", "freeze", "kill"):
                if was.get(name) != now.get(name):
                    found.append(f"{key} {name}: {now.get(name)!r} instead of {was.get(name)!r}")
    found += [f"{key} lives for ever" for key in harmed.immortal - clean.immortal]
    return found


def written_lines() -> set[str]:
    """Every line of lua/ that writes."""
    pattern = re.compile(r"redis\.call\(\"(" + "|".join(WRITES) + r")\"")
    return {
        f"{path.relative_to(lua_root())}:{number}"
        for path in lua_root().rglob("*.lua")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    }


async def test_the_story_runs_every_script(real: Store, prefix: str) -> None:
    """Else a script would be missing from what follows."""
    breaking = Breaking(real)
    breaking.begin(None)
    await play(breaking, prefix)
    assert {name for name, _ in breaking.scripts} == set(script_names())


async def test_a_script_that_is_cut_short_is_finished_by_the_same_request(real: Store, prefix: str) -> None:
    """After every write of every script, at every step."""
    breaking = Breaking(real)
    clean = await play(breaking, f"{prefix}c")
    cuts, wrong = 0, []
    for name in STORY:
        for number in range(1, SCRIPTS_MAX + 1):
            for write in range(1, WRITES_MAX + 1):
                harmed = await play(breaking, f"{prefix}h", Harm(name, cut=(number, write)))
                if not breaking.is_cut:
                    break
                cuts += 1
                wrong += [f"{name}, script {number}, write {write}: {each}" for each in differences(clean, harmed)]
            if len(breaking.scripts) < number:
                break
        assert not wrong, "\n".join(wrong)
    assert breaking.lines == written_lines(), "every write of lua/ was cut at least once"
    Row("F9", f"every write of {len(script_names())} scripts fails once", faults=cuts, claims=cuts * len(STORY)).write()


async def test_a_key_of_a_wrong_type_stops_a_script_before_it_wrote(real: Store, prefix: str) -> None:
    """Each key of each script, at every step; once it is mended the same request goes through."""
    breaking = Breaking(real)
    clean = await play(breaking, f"{prefix}c")
    faults, wrong, noticed = 0, [], set()
    for name in STORY:
        for key, slots in (await keys_of(breaking, f"{prefix}h", name)).items():
            harmed = await play(breaking, f"{prefix}h", Harm(name, key=key))
            faults += 1
            if breaking.has_failed:
                noticed |= slots
            wrong += [f"{name}, {key}: {each}" for each in differences(clean, harmed)]
        assert not wrong, "\n".join(wrong)
    every = {f"{name} {slot.name}" for name in script_names() for slot in load(name).keys}
    assert noticed == every, "each key of each script was of a wrong type at least once, and noticed"
    Row("F9", "a wrong type on each key", faults=faults, claims=faults * len(STORY)).write()


async def keys_of(breaking: Breaking, prefix: str, at: str) -> dict[str, set[str]]:
    """The keys of one step in an untroubled play, and what its scripts call them: "script key"."""
    guard = make_guard(breaking, prefix)
    for name, act in STORY.items():
        breaking.begin(None)
        await act(guard)
        if name == at:
            break
    found: dict[str, set[str]] = {}
    for name, keys in breaking.scripts:
        slots = load(name).keys
        for number, key in enumerate(keys):
            found.setdefault(key, set()).add(f"{name} {slots[min(number, len(slots) - 1)].name}")
    left = await breaking.store.scan(f"{prefix}:*")
    await breaking.store.execute(*[("UNLINK", key) for key in left])
    return found


def test_the_lines_that_write_are_found() -> None:
    assert any(line.startswith("include/hash.lua") for line in written_lines())
    assert load("before").text.count("redis.call(") >= 1
