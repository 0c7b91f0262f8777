"""Long random walks with fixed seeds: they reach further than shrinkable examples, and repeat exactly."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from tests.reference.pair import Pair
from tests.servers import Server

MOVES = 60
SEEDS = int(os.environ.get("GUARDD_WALKS", "40"))
RUNS = ["r1", "r1", "r1", "r1/a", "r1/a", "r1/a/b", "r2"]
LOOPING = ["plain", "plain", "poll", "team", "note", "seen", "read"]
NEVER = [None, None, None]
CHOICES: dict[str, list[Any]] = {
    "max_steps": [6, 30, None, None], "max_wall_ms": [60_000, None, None], "max_same_call": [1, 2, 3, None],
    "cycle_window": [3, 8], "max_cycle_period": [0, 2, 4], "max_no_progress": [2, 4, None], "max_denied": [1, 3, None, None],
    "max_retries": [1, 3], "max_depth": [4, 4, 4, 1], "max_replays": [0, 1, 8], "max_tokens": [*NEVER, *NEVER, 0, 50, 200],
    "max_model_calls": [*NEVER, 3], "max_cost_micros": [None, None, 30], "max_handoffs": [None, 3],
    "max_role_returns": [None, 1], "max_empty": [None, 2], "max_same_target": [None, 2], "on_refusal": ["stop", "deny"],
    "window_scope": ["run", "run", "agent", "tree"],
}  # fmt: skip


class Walk:
    """One walk: a seed decides limits, moves and everything in them."""

    def __init__(self, url: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.pair = Pair(url, {name: self.pick(values) for name, values in CHOICES.items()})
        ending = ["complete", "fatal"] if self.random.random() < 0.3 else []
        self.statuses = (
            ["progress"] * 14
            + ["retryable"] * 8
            + ["invalid_input"] * 2
            + ["permission_denied", "human_required", *ending]
        )
        self.requests: list[dict[str, Any]] = []
        self.charges: list[dict[str, Any]] = []

    def pick(self, choices: Any) -> Any:
        return self.random.choice(choices)

    def usage(self) -> Any:
        return self.pick([None, None, {"tokens": 10}, {"model_calls": 1}, {"cost_micros": 5, "tokens": 1}])

    def reserve(self) -> Any:
        return self.pick([*NEVER, {"tokens": 20}, {"cost_micros": 10}])

    def retry(self) -> Any:
        return self.pick([*NEVER, {"change": "retry_after_elapsed"}, {"change": "strategy_changed"}])

    def move(self) -> None:
        """One move, weighted: mostly loops and effects, now and then an operator."""
        moves = {
            self.loop: 30, self.effect: 15, self.ask_again: 8, self.late_result: 9, self.charge: 5, self.charge_again: 3,
            self.settle: 3, self.handoff: 5, self.resolve: 3, self.freeze: 3, self.resume: 6, self.end: 1, self.open: 3,
            self.time: 4, self.pair.another_daemon: 1, self.pair.flush_scripts: 1,
        }  # fmt: skip
        self.random.choices(list(moves), list(moves.values()))[0]()

    def loop(self) -> None:
        tools = [self.pick(LOOPING) for _ in range(self.random.randint(1, 3))] * self.random.randint(1, 3)
        common = {
            "run": self.pick(RUNS),
            "agent": self.pick(["w", "w", "v", ""]),
            "client": "one",
            "retry": self.retry(),
        }
        args = {"i": self.random.randint(0, 1)}
        for tool in tools:
            request = {**common, "call": self.pair.fresh("c"), "tool": tool, "args": args}
            self.requests.append(request)
            if self.pair.play("before", **request).get("action") == "execute" and self.random.random() < 0.9:
                self.pair.now += self.random.randint(0, 300)
                self.report(request, version=self.random.random() < 0.4)

    def report(self, request: dict[str, Any], *, version: bool) -> None:
        self.pair.play(
            "after", run=request["run"], call=request["call"], status=self.pick(self.statuses),
            progress_version=self.random.randint(0, 5) if version else None, usage=self.usage(),
            value=self.pick([..., ..., ..., None, " ", [], 0, {"cursor": 1}, {"cursor": 2}, {"cursor": 3}]),
            retry_after_ms=self.pick([None, None, 500]), side_effect_committed=self.pick([*NEVER, True, False]),
        )  # fmt: skip

    def effect(self) -> None:
        request = {
            "run": self.pick(RUNS), "agent": self.pick("wv"), "client": self.pick(["one", "two"]), "call": self.pair.fresh("c"),
            "tool": self.pick(["pay", "put", "refund", "plain"]), "args": {"i": self.random.randint(0, 1)},
            "idempotency_key": self.pick(["k1", "k1", "k2"]), "scope": self.pick([None, None, "global"]),
            "usage": self.usage(), "reserve": self.reserve(), "retry": self.retry(),
        }  # fmt: skip
        self.requests.append(request)
        if self.pair.play("before", **request).get("action") == "execute" and self.random.random() < 0.8:
            self.pair.now += self.pick([0, 5, 5, 5, 31_000])
            self.report(request, version=False)

    def ask_again(self) -> None:
        if self.requests:
            request = self.pick(self.requests[-6:])
            client, run = self.pick(["one", "two", request["client"]]), self.pick([request["run"]] * 9 + ["r2"])
            self.pair.play("before", **{**request, "client": client, "run": run})

    def late_result(self) -> None:
        if self.requests:
            self.report(self.pick(self.requests[-8:]), version=True)

    def charge(self) -> None:
        self.charges.append(
            {"run": self.pick(RUNS), "op_id": self.pair.fresh("o"), "usage": self.usage(), "reserve": self.reserve()}
        )
        self.pair.play("charge", **self.charges[-1])

    def charge_again(self) -> None:
        if self.charges:
            self.pair.play("charge", **self.pick(self.charges))

    def settle(self) -> None:
        if self.charges:
            charge = self.pick(self.charges)
            self.pair.play("settle", run=charge["run"], op_id=charge["op_id"], usage=self.usage())

    def handoff(self) -> None:
        agents = {"from": self.pick("abc"), "to": self.pick("abc")}
        self.pair.play("handoff", run=self.pick(RUNS), op_id=self.pair.fresh("h"), state=self.pick([None, 1]), **agents)

    def resolve(self) -> None:
        self.pair.play(
            "resolve", run=self.pick(RUNS), tool=self.pick(["pay", "put", "refund"]), idempotency_key=self.pick(["k1", "k2"]),
            state=self.pick(["committed", "not_executed"]), scope=self.pick([None, "global"]),
        )  # fmt: skip

    def freeze(self) -> None:
        scopes = ["all", "retries", "handoffs", "subruns", "effects", "retries,effects"]
        self.pair.play("freeze", run=self.pick(RUNS), scope=self.pick(scopes))

    def resume(self) -> None:
        limits = self.pick([None, {"max_steps": 30}, {"max_tokens": 500}])
        self.pair.play("resume", run=self.pick(RUNS), change=self.pick(["human_input"] * 4 + ["again"]), limits=limits)

    def end(self) -> None:
        op, reason = self.pick([("kill", "killed"), ("finish", "framework_cap")])
        self.pair.play(op, run=self.pick(RUNS), reason=reason)

    def open(self) -> None:
        self.pair.play("open", run=self.pick(RUNS), progress_version=self.pick([*NEVER, 0, 1, 2, 3, 4, 5]))

    def time(self) -> None:
        self.pair.now += self.pick([0, 1, 100, 600, 6000, 31_000])


def walk(url: str, seed: int) -> None:
    journey = Walk(url, seed)
    try:
        for _ in range(MOVES):
            journey.move()
            journey.pair.agree()
    finally:
        journey.pair.close()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_long_walk_on_a_real_server(seed: int, embedded: Server) -> None:
    """Every answer and every counter is that of the model."""
    walk(embedded.url, seed)


@pytest.mark.parametrize("seed", range(1000, 1000 + SEEDS // 4))
def test_a_long_walk_on_the_fake(seed: int) -> None:
    """The same on fakeredis."""
    walk("fakeredis:", seed)
