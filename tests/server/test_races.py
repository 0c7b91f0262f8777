"""Races with real processes on a real server: twelve ask for one thing, exactly one gets it (SPEC 2.6, 2.2)."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from typing import Any

import pytest

from guardd.engine.config import EngineConfig
from guardd.engine.core import Engine
from guardd.model.limits import REFERENCE, Policy
from guardd.store.connect import open_store
from tests.servers import Server

PROCESSES, ROUNDS = 12, 50
LIMITS = {
    "the last step": {"max_steps": 1},
    "one claim": {},
    "one global claim": {},
    "the last tokens": {"max_tokens": 100},
}


def params_of(what: str, number: int, worker: int) -> tuple[str, dict[str, Any]]:
    """What one worker asks in one round: always the same thing, under an id of its own."""
    run, call = f"r{number}", f"c{number}-{worker}"
    match what:
        case "the last step":
            return "before", {"run": run, "call": call, "tool": "t", "args": {"worker": worker}}
        case "one claim":
            return "before", {"run": run, "call": call, "tool": "pay", "idempotency_key": "k"}
        case "one global claim":
            return "before", {
                "run": f"{run}-{worker}",
                "call": call,
                "tool": "pay",
                "idempotency_key": f"k{number}",
                "scope": "global",
            }
        case _:
            return "charge", {"run": run, "op_id": call, "reserve": {"tokens": 60}}


def work(url: str, prefix: str, what: str, worker: int, start: Barrier, answers: Any) -> None:
    """One process: its own engine and connection; all wait for each other before each round."""

    async def main() -> None:
        policy = Policy("reference", {**REFERENCE.limits, "max_denied": None, **LIMITS[what]}, frozenset())
        config = EngineConfig(policies={"reference": policy}, default_policy="reference", prefix=prefix)
        async with await open_store(url) as opened:
            guard = Engine(opened.store, config)
            for number in range(ROUNDS):
                start.wait()
                answer = await guard.call(*params_of(what, number, worker))
                answers.put((number, answer.action, answer.reason))  # type: ignore[union-attr]

    asyncio.run(main())


@pytest.fixture
def workers() -> Iterator[list[multiprocessing.process.BaseProcess]]:
    """Processes of the test; none is left behind."""
    started: list[multiprocessing.process.BaseProcess] = []
    yield started
    for process in started:
        if process.is_alive():
            process.kill()
        process.join()


@pytest.mark.parametrize(
    ("what", "others"),
    [
        ("the last step", ("stop", "step_cap")),
        ("one claim", ("wait", "in_flight")),
        ("one global claim", ("wait", "in_flight")),
        ("the last tokens", ("deny", "token_cap")),
    ],
)
def test_exactly_one_of_twelve_processes_wins(
    what: str, others: tuple[str, str], embedded: Server, prefix: str, workers: list[Any]
) -> None:
    """Fifty rounds; the others are told why, and the store agrees with what was answered."""
    context = multiprocessing.get_context("spawn")
    start, answers = context.Barrier(PROCESSES), context.Queue()
    for worker in range(PROCESSES):
        process = context.Process(target=work, args=(embedded.url, prefix, what, worker, start, answers))
        process.start()
        workers.append(process)
    said = Counter(answers.get(timeout=120) for _ in range(PROCESSES * ROUNDS))
    for process in workers:
        process.join()
        assert process.exitcode == 0
    granted = {number: count for (number, action, _), count in said.items() if action in ("execute", "continue")}
    assert granted == dict.fromkeys(range(ROUNDS), 1)
    assert {(action, reason) for _, action, reason in said if action not in ("execute", "continue")} == {others}
    if what != "one global claim":
        field, value = {"the last tokens": ("held_tokens", "60")}.get(what, ("steps", "1"))
        client = embedded.client()
        assert {client.hget(f"{prefix}:{{r{number}}}:run", field) for number in range(ROUNDS)} == {value}
