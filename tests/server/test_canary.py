"""A store that was flushed, rolled back or replaced grants nothing until an operator has looked (SPEC 5)."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest

from guardd.engine.config import EngineConfig
from guardd.engine.core import Engine
from guardd.keys import Keys, slot_of
from guardd.model.errors import StoreUnavailable
from guardd.store.connect import OpenedStore, open_store
from tests.daemons import daemon
from tests.servers import Server, wait_until


async def opened_by(embedded: Server, prefix: str, memory: Path | None = None) -> OpenedStore:
    return await open_store(embedded.url, prefix=prefix, memory=memory)


def guard_of(opened: OpenedStore, prefix: str) -> Engine:
    return Engine(opened.store, EngineConfig(prefix=prefix))


async def ask(guard: Engine, **params: Any) -> Any:
    return await guard.call("before", {"run": "r", "call": secrets.token_hex(8), "tool": "t", **params})


def lose_all(embedded: Server, prefix: str) -> None:
    client = embedded.client()
    client.delete(*client.keys(f"{prefix}:*"))


def go_back(embedded: Server, prefix: str) -> None:
    """As a restart without its last second: the beat is lower than one that was answered."""
    embedded.client().hset(f"{prefix}:canary", "beat", 1)


def another(embedded: Server, prefix: str) -> None:
    embedded.client().hset(f"{prefix}:canary", "id", "another")


LOSSES = [lose_all, go_back, another]


@pytest.mark.parametrize("lose", LOSSES)
async def test_after_a_loss_nothing_is_granted_until_an_operator_confirms(
    embedded: Server, prefix: str, lose: Any
) -> None:
    async with await opened_by(embedded, prefix) as opened:
        guard = guard_of(opened, prefix)
        for _ in range(3):
            await ask(guard)
        lose(embedded, prefix)
        await opened.prove()
        with pytest.raises(StoreUnavailable, match=r"canary.*guardd doctor --confirm"):
            await ask(guard, run="other")
        assert (await guard.call("kill", {"run": "other", "reason": "incident_stop"})).action == "stop"
        await guard.call("confirm", {})
        assert (await ask(guard, run="third")).action == "execute"


async def test_a_loss_is_noticed_in_the_batch_that_comes_first(embedded: Server, prefix: str) -> None:
    """Not a second later: the beat of the very batch says so, and what it granted is taken back."""
    async with await opened_by(embedded, prefix) as opened:
        guard = guard_of(opened, prefix)
        await ask(guard)
        lose_all(embedded, prefix)
        with pytest.raises(StoreUnavailable, match="went back"):
            await ask(guard, run="pays", tool="pay", idempotency_key="k")
        digest = guard.context.shaper.record("pays", "pay", "k", "run").digest
        assert embedded.client().hget(guard.context.keys.op("pays", digest), "state") == "freed"
        assert embedded.client().hget(guard.context.keys.run("pays"), "steps") == "0"


async def test_other_daemons_hear_of_it(embedded: Server, prefix: str) -> None:
    """One that was idle, and one that started later: both stop, both go on after the confirmation."""
    async with await opened_by(embedded, prefix) as first, await opened_by(embedded, prefix) as idle:
        await ask(guard_of(first, prefix))
        go_back(embedded, prefix)
        embedded.client().hset(f"{prefix}:canary", "beat", 0)
        await first.prove()
        async with await opened_by(embedded, prefix) as late:
            for opened in (idle, late):
                await opened.prove()
                with pytest.raises(StoreUnavailable, match="went back"):
                    await ask(guard_of(opened, prefix))
            await guard_of(late, prefix).call("confirm", {})
            for opened in (first, idle, late):
                await opened.prove()
                assert opened.store.trouble == ""
                assert (await ask(guard_of(opened, prefix), tool=secrets.token_hex(4))).action == "execute"


async def test_beats_that_pass_the_old_mark_lift_nothing(embedded: Server, prefix: str) -> None:
    """Trouble stays until somebody confirms, however much the others write meanwhile."""
    async with await opened_by(embedded, prefix) as opened:
        await ask(guard_of(opened, prefix))
        go_back(embedded, prefix)
        embedded.client().hset(f"{prefix}:canary", "beat", 0)
        await opened.prove()
        embedded.client().hset(f"{prefix}:canary", "beat", 1000)
        embedded.client().hdel(f"{prefix}:canary", "suspect")
        await opened.prove()
        assert "went back" in opened.store.trouble


async def test_a_loss_is_noticed_however_far_others_went_on_since(
    embedded: Server, prefix: str, tmp_path: Path
) -> None:
    """A primary that was cut off with one daemon: the others count on elsewhere, past all that it saw."""
    async with (
        await opened_by(embedded, prefix, tmp_path / "cut.json") as cut,
        await opened_by(embedded, prefix, tmp_path / "other.json") as other,
    ):
        for opened in (cut, other):
            await ask(guard_of(opened, prefix))
        kept = embedded.client().hgetall(f"{prefix}:canary")
        for _ in range(3):
            await ask(guard_of(cut, prefix), tool=secrets.token_hex(4))
        embedded.client().delete(f"{prefix}:canary")
        embedded.client().hset(f"{prefix}:canary", mapping=kept)
        for _ in range(10):
            await ask(guard_of(other, prefix), run=secrets.token_hex(4))
        with pytest.raises(StoreUnavailable, match="went back"):
            await ask(guard_of(cut, prefix), run="pays")
        await cut.prove()
        await other.prove()
        assert "went back" in other.store.trouble


@pytest.mark.parametrize("lose", LOSSES)
async def test_a_daemon_that_was_away_meanwhile_remembers(
    embedded: Server, prefix: str, tmp_path: Path, lose: Any
) -> None:
    """What it knows of the canary is in its state directory."""
    memory = tmp_path / "canary.json"
    async with await opened_by(embedded, prefix, memory) as opened:
        for _ in range(3):
            await ask(guard_of(opened, prefix))
        await opened.prove()
    lose(embedded, prefix)
    async with await opened_by(embedded, prefix, memory) as opened:
        with pytest.raises(StoreUnavailable, match="canary"):
            await ask(guard_of(opened, prefix))
        await guard_of(opened, prefix).call("confirm", {})
    async with await opened_by(embedded, prefix, memory) as opened:
        assert opened.store.trouble == ""


async def test_a_machine_that_went_down_in_mid_write_is_noticed_by_its_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Durability memory, embedded: store and memory lost their last second together. A clean stop, or fsync, is no matter."""
    for durability, is_clean, is_noticed in (("memory", False, True), ("memory", True, False), ("fsync", False, False)):
        folder = tmp_path / f"{durability}-{is_clean}"
        folder.mkdir(mode=0o700)
        memory = folder / "canary.json"

        async def opened(durability: str = durability, folder: Path = folder, memory: Path = memory) -> OpenedStore:
            return await open_store(state_dir=folder / "store", durability=durability, prefix="guardd", memory=memory)

        async with await opened():
            crashed = memory.read_text()
        if not is_clean:
            memory.write_text(crashed)
        with monkeypatch.context() as patched:
            patched.setattr("guardd.store.canary.boot_id", lambda: "another life")
            async with await opened() as again:
                assert ("this machine went down" in again.store.trouble) == is_noticed
                await guard_of(again, "guardd").call("confirm", {})
                assert again.store.trouble == ""


async def test_many_batches_at_once_accuse_nobody(embedded: Server, prefix: str) -> None:
    """Replies of several connections come in any order; so do looks at the canary between them."""
    import asyncio

    async with await open_store(embedded.url, prefix=prefix, pipes=4) as opened:
        guard = guard_of(opened, prefix)

        async def work(number: int) -> None:
            for step in range(20):
                await ask(guard, run=f"r{number}", args={"step": step})
                await opened.prove()

        await asyncio.gather(*(work(number) for number in range(20)))
        assert opened.store.trouble == ""


async def test_a_flushed_store_stops_a_daemon_and_the_doctor_mends_it(embedded: Server, prefix: str) -> None:
    """As an operator sees it: the log says why, `guardd doctor --confirm` lets it go on."""
    import asyncio
    import sys

    from guardd_client import AsyncGuard, GuardUnavailable

    async with daemon(embedded.url, prefix) as served, AsyncGuard(served.url, deadline_ms=1500) as guard:
        await guard.run("r").before("t")
        lose_all(embedded, prefix)
        with pytest.raises(GuardUnavailable, match="guardd doctor --confirm"):
            await guard.run("s").before("t")
        wait_until(lambda: any(event["event"] == "store.distrusted" for event in served.log()), what="the log event")
        command = [sys.executable, "-m", "guardd.cli.main", "doctor", "--confirm", "--url", served.url]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        said, _ = await process.communicate()
        assert (process.returncode, said.decode()) == (0, "confirmed: every daemon grants again within a second\n")
        assert (await guard.run("s").before("t")).action == "execute"


def test_every_primary_of_a_usual_cluster_holds_a_canary() -> None:
    """One each 512 slots, under names that hash there."""
    assert [slot_of(key) for key in Keys("guardd").cluster_canaries()] == list(range(0, 16_384, 512))
    assert slot_of("guardd:{run_42}:run") == slot_of("{run_42}") == slot_of("run_42")
    assert slot_of("123456789") == 0x31C3, "the check value of the cluster specification"
    assert slot_of("a{}b") == slot_of(b"a{}b") != slot_of("")
