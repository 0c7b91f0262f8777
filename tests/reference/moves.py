"""Random games: a few limits and tool rules, and a sequence of operations that reaches deep states.

Few runs, agents, tools, arguments and keys, so that repeats, cycles, replays and
conflicts happen by themselves; what ends a run for good is rare.

One table makes the moves, from either source of choices:

    games()             a hypothesis strategy, for failures that shrink
    seeded_game(seed)   plain random numbers: a hundred times faster, and deeper,
                        for hypothesis prefers small choices; `shortened` cuts a failure down
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

Move = dict[str, Any]
Choose = Callable[[Sequence[Any]], Any]

RUNS = ("r1", "r1", "r1", "r1/a", "r1/a", "r1/a/b", "r2")
AGENTS = ("w", "w", "v")
CLIENTS = (None, None, None, None, "two")
TOOLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "read": {"read_only": True},
    "pay": {"effect_key": ["i"]},
    "put": {"requires_key": True, "on_in_doubt": "reclaim"},
    "refund": {"effect_scope": "global", "effect_key": ["i"]},
    "poll": {"cycle_exempt": True, "max_same_call": 4, "no_progress_exempt": True},
    "note": {"target_args": ["i"], "max_same_target": 3, "keep_args": ["request_id"]},
    "drain": {"target_args": ["i"], "progress": {"pointer": "/n", "when": "decreases"}},
    "watch": {"progress": {"pointer": "/n", "when": "new"}, "max_retries": 1},
    "team.*": {"window_scope": "tree", "aliases": []},
    "strict": {"result_schema": {"type": "object"}, "max_empty": 2, "aliases": ["STRICT"]},
}
NAMES = (
    "plain",
    "plain",
    "read",
    "pay",
    "put",
    "refund",
    "poll",
    "note",
    "drain",
    "watch",
    "team.x",
    "strict",
    "STRICT",
)
KEYS = (None, None, None, "k1", "k1", "k2")
CHANGES = ("retry_after_elapsed", "strategy_changed", "strategy_changed", "try again")
STATUSES = ("progress",) * 8 + ("retryable",) * 5 + ("invalid_input", "permission_denied", "policy_blocked")
RARE_STATUSES = ("complete", "fatal", "human_required")
VALUES: tuple[Any, ...] = (None, "", " \n", [], 0, {"n": 1}, {"n": 2}, {"n": 3}, {"n": 2, "m": 1})
USAGES = ({"tokens": 1}, {"tokens": 4, "model_calls": 1}, {"cost_micros": 3})
RESERVES = ({"tokens": 5}, {"cost_micros": 9}, {"model_calls": 1})
FREEZES = ("all", "all", "retries", "handoffs", "subruns", "effects", "retries,subruns")
STEPS_MS = (0, 0, 1, 10, 100, 100, 100, 1_000, 1_000, 5_000, 29_900, 30_000, 70_000)

# Few at a time, so that a game comes back to them.
TOOLS_IN_A_GAME = 4

# What is played how often, of about 100.
WEIGHTS = {
    "before": 38,
    "after": 30,
    "resend": 6,
    "renew": 1,
    "open": 2,
    "charge": 3,
    "settle": 2,
    "handoff": 8,
    "freeze": 2,
    "resume": 4,
    "resolve": 2,
    "deny_rule": 2,
    "kill": 1,
    "finish": 1,
}
KINDS = tuple(kind for kind, weight in WEIGHTS.items() for _ in range(weight))

LIMITS: dict[str, tuple[Any, ...]] = {
    "max_steps": (None, None, 40, 12),
    "max_wall_ms": (None, None, 400_000),
    "max_same_call": (None, 1, 2, 3),
    "cycle_window": (1, 4, 8),
    "max_cycle_period": (16, 0, 2, 4),
    "max_no_progress": (None, 2, 3, 6),
    "max_denied": (None, None, 3, 2, 1),
    "max_retries": (1, 2, None),
    "max_depth": (4, 4, 1),
    "max_replays": (0, 1, 2, 8),
    "max_tokens": (None, None, 30, 12, 0),
    "max_model_calls": (None, None, 6, 3),
    "max_cost_micros": (None, None, 20, 12),
    "max_handoffs": (None, 5),
    "max_role_returns": (None, 1, 2),
    "max_empty": (None, 1, 2),
    "max_same_target": (None, 2),
    "on_refusal": ("deny", "deny", "stop"),
    "window_scope": ("run", "run", "agent", "tree"),
    "mode": ("enforce",) * 9 + ("observe",),
}


@dataclass
class Game:
    """What both sides are set up with, and what they are asked."""

    policy: str
    limits: dict[str, Any]
    ops: list[Move]


class Table:
    """Makes one move after the other, with an eye on those that were made."""

    def __init__(self, pick: Choose) -> None:
        self.pick = pick
        self.tools = [pick(NAMES) for _ in range(TOOLS_IN_A_GAME)]
        self.now = 0
        self.ops: list[Move] = []
        self.asked: list[Move] = []  # every `before` of a new id
        self.unreported: list[Move] = []
        self.charged: list[Move] = []
        self.handed: list[Move] = []

    def chance(self, one_in: int) -> bool:
        return bool(self.pick(range(one_in)) == one_in - 1)

    def move(self) -> None:
        """One operation; kinds that need an earlier one become a `before` while there is none."""
        self.now += self.pick(STEPS_MS)
        made: Move = getattr(self, self.pick(KINDS))()
        move = {name: value for name, value in made.items() if value is not None or name == "value"}
        self.ops.append(move | {"at_ms": self.now})

    def before(self) -> Move:
        args: Any = {"i": self.pick((0, 1))}
        if self.chance(5):
            args["request_id"] = self.pick((0, 1, 2))
        move = {
            "op": "before",
            "call": f"c{len(self.asked)}",
            "run": self.pick(RUNS),
            "agent": self.pick(AGENTS),
            "client": self.pick(CLIENTS),
            "tool": self.pick(self.tools),
            "args": args,
            "idempotency_key": self.pick(KEYS),
            "scope": "global" if self.chance(8) else None,
            "retry": {"change": self.pick(CHANGES)} if self.chance(3) else None,
            "progress_version": self.pick((0, 1, 2, 3, 4)) if self.chance(12) else None,
            "usage": self.pick(USAGES) if self.chance(4) else None,
            "reserve": self.pick(RESERVES) if self.chance(6) else None,
        }
        if self.asked and self.chance(2):  # much the same as before: loops are made of that
            again = self.pick(self.asked[-4:])
            same = ("run", "agent", "tool", "args", "idempotency_key", "scope")
            move |= {name: again[name] for name in same}
        if move["idempotency_key"] is None and "effect_key" not in TOOLS.get(move["tool"], {}):
            move["scope"] = None  # the scope of no key at all is nothing the rules speak of
        self.asked.append(move)
        self.unreported.append(move)
        return move

    def after(self) -> Move:
        """Mostly the result of a call without one, sometimes a second report."""
        if not self.unreported:
            return self.before()
        again = self.chance(10)
        call = self.pick(self.asked if again else self.unreported)
        if not again:
            self.unreported.remove(call)
        status = self.pick(RARE_STATUSES if self.chance(25) else STATUSES)
        move = {
            "op": "after",
            "call": call["call"],
            "run": call["run"],
            "status": status,
            "progress_version": self.pick((0, 0, 1, 2, 3, 4, 5)) if self.chance(4) else None,
            "side_effect_committed": self.pick((True, False)) if self.chance(6) else None,
            "retry_after_ms": self.pick((0, 500, 40_000)) if status == "retryable" and self.chance(2) else None,
            "usage": self.pick(USAGES) if self.chance(8) else None,
        }
        if status in ("progress", "complete"):
            if call["tool"] in ("drain", "watch"):
                move["value"] = {"n": self.pick((1, 2, 3, 4, 5, "x"))}
            elif self.chance(3):
                move["value"] = self.pick(VALUES)
        return move

    def resend(self) -> Move:
        """An earlier id again: as it was, from another client, or (rarely) for something else."""
        earlier = self.asked + self.charged + self.handed
        if not earlier:
            return self.before()
        move = dict(self.pick(earlier[-12:]))
        if move["op"] == "before":
            if self.chance(3):
                move["client"] = self.pick(("two", "three"))
            if self.chance(10):
                move["args"] = {"i": 2}
            if self.chance(10):
                move["run"] = self.pick(RUNS)
        return move

    def renew(self) -> Move:
        if not self.unreported:
            return self.before()
        call = self.pick(self.unreported)
        return {
            "op": "renew",
            "call": call["call"],
            "run": call["run"],
            "lease_ms": self.pick((None, 50_000)),
        }

    def open(self) -> Move:
        return {"op": "open", "run": self.pick(RUNS), "progress_version": self.pick((None, None, 0, 1, 3))}

    def charge(self) -> Move:
        move = {
            "op": "charge",
            "run": self.pick(RUNS),
            "op_id": f"m{len(self.charged)}",
            "usage": self.pick((None, *USAGES)),
            "reserve": self.pick((None, *RESERVES)),
        }
        self.charged.append(move)
        return move

    def settle(self) -> Move:
        if not self.charged:
            return self.charge()
        charge = self.pick(self.charged)
        return {
            "op": "settle",
            "run": charge["run"],
            "op_id": charge["op_id"],
            "usage": self.pick((None, *USAGES)),
        }

    def handoff(self) -> Move:
        move = {
            "op": "handoff",
            "run": self.pick(RUNS),
            "from": self.pick(("p", "q")),
            "to": self.pick(("p", "q", "q", "s")),
            "state": self.pick((None, None, {"n": 1})),
            "op_id": f"h{len(self.handed)}",
        }
        self.handed.append(move)
        return move

    def freeze(self) -> Move:
        return {"op": "freeze", "run": self.pick(RUNS), "scope": self.pick(FREEZES)}

    def resume(self) -> Move:
        limits = {"max_steps": 60, "max_tokens": 90} if self.chance(4) else None
        change = self.pick(("strategy_changed", "human_input", "limits_raised", "again"))
        return {"op": "resume", "run": self.pick(RUNS), "change": change, "limits": limits}

    def resolve(self) -> Move:
        return {
            "op": "resolve",
            "run": self.pick(RUNS),
            "tool": self.pick(("pay", "put", "plain", "refund")),
            "idempotency_key": self.pick(("k1", "k2", "[0]", "[1]")),
            "scope": self.pick((None, None, "global")),
            "state": self.pick(("committed", "not_executed")),
        }

    def deny_rule(self) -> Move:
        if self.chance(2):
            return {"op": "deny_rule", "id": "d1", "remove": True}
        tool, prefix = self.pick(("p*", "team.?", "plain", "read")), self.pick((None, "r1/a"))
        return {
            "op": "deny_rule",
            "id": "d1",
            "tool": tool,
            "run_prefix": prefix,
            "until_ms": self.now + 5_000,
        }

    def kill(self) -> Move:
        return {
            "op": "kill",
            "run": self.pick(("r1/a/b", "r2", "r1/a")),
            "reason": self.pick(("killed", "own-word")),
        }

    def finish(self) -> Move:
        reason = self.pick(("framework_cap", "framework_cap", "complete", "cancelled"))
        return {"op": "finish", "run": self.pick(RUNS), "reason": reason}


def played(pick: Choose, least: int, most: int) -> Game:
    """A game of `least` to `most` operations on a clock that never goes back."""
    limits = {name: pick(values) for name, values in LIMITS.items()}
    policy = pick(("reference", "reference", "agent"))
    table = Table(pick)
    for _ in range(pick(range(least, most + 1))):
        table.move()
    return Game(policy, limits, table.ops)


@st.composite
def games(draw: st.DrawFn, least: int = 20, most: int = 80) -> Game:
    """A strategy for games."""
    return played(lambda values: draw(st.sampled_from(values)), least, most)


def seeded_game(seed: int, least: int = 20, most: int = 120) -> Game:
    """The game of a seed; the same one for ever."""
    return played(random.Random(seed).choice, least, most)


def shortened(game: Game, fails: Callable[[Game], bool]) -> Game:
    """The game without the operations and limits that its failure does not need."""
    smaller = True
    while smaller:
        smaller = False
        for index in reversed(range(len(game.ops))):
            shorter = replace(game, ops=game.ops[:index] + game.ops[index + 1 :])
            if fails(shorter):
                game, smaller = shorter, True
    for name in LIMITS:
        plainer = replace(game, limits={key: value for key, value in game.limits.items() if key != name})
        if fails(plainer):
            game = plainer
    return game
