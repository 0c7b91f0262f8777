"""The checker itself: what it must accept, and above all what it must not."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from tests.fault.linearizability import Model, Op, capped_counter, claim_register, is_linearizable, unexplained


def history(*rows: tuple[float, float | None, Any, Any]) -> list[Op]:
    return [Op(*row) for row in rows]


CLAIM_A, CLAIM_B = ("claim", "a"), ("claim", "b")
COMMIT_A, COMMIT_B = ("commit", "a", "1"), ("commit", "b", "2")

ACCEPTED = {
    "nothing": history(),
    "claim, commit, replay": history((0, 1, CLAIM_A, "execute"), (2, 3, COMMIT_A, "held"), (4, 5, CLAIM_B, ("replay", "1"))),
    "the second to call may be the first to have claimed": history((0, 9, CLAIM_A, "in_flight"), (1, 2, CLAIM_B, "execute")),
    "a commit that is under way may be seen, or not yet": history(
        (0, 1, CLAIM_A, "execute"), (2, 9, COMMIT_A, "held"), (3, 4, CLAIM_B, "in_flight"), (5, 6, ("claim", "c"), ("replay", "1"))
    ),
    "a commit that nobody heard of may have happened": history(
        (0, 1, CLAIM_A, "execute"), (2, None, COMMIT_A, None), (3, 4, CLAIM_B, ("replay", "1"))
    ),
    "or not": history((0, 1, CLAIM_A, "execute"), (2, None, COMMIT_A, None), (3, 4, CLAIM_B, "in_flight")),
    "a claim that nobody heard of holds the key": history((0, None, CLAIM_A, None), (1, 2, CLAIM_B, "in_flight")),
    "an owner may commit after its lease": history(
        (0, 1, CLAIM_A, "execute"), (2, 3, CLAIM_B, "in_doubt"), (4, 5, COMMIT_A, "held"), (6, 7, CLAIM_B, ("replay", "1"))
    ),
}  # fmt: skip

REJECTED = {
    "a double grant": history((0, 1, CLAIM_A, "execute"), (2, 3, CLAIM_B, "execute")),
    "a double grant of overlapping calls": history((0, 9, CLAIM_A, "execute"), (1, 8, CLAIM_B, "execute")),
    "a grant after the lease": history(
        (0, 1, CLAIM_A, "execute"), (2, 3, CLAIM_B, "in_doubt"), (4, 5, ("claim", "c"), "execute")
    ),
    "a grant after a commit that nobody heard of": history(
        (0, 1, CLAIM_A, "execute"), (2, None, COMMIT_A, None), (3, 4, CLAIM_B, "execute")
    ),
    "a replay of another value": history(
        (0, 1, CLAIM_A, "execute"), (2, 3, COMMIT_A, "held"), (4, 5, CLAIM_B, ("replay", "2"))
    ),
    "a replay of what nobody committed": history((0, 1, CLAIM_A, "execute"), (2, 3, CLAIM_B, ("replay", "1"))),
    "a lost commit, granted anew": history(
        (0, 1, CLAIM_A, "execute"), (2, 3, COMMIT_A, "held"), (4, 5, CLAIM_B, "execute")
    ),
    "a stale read: in flight after the commit was acknowledged": history(
        (0, 1, CLAIM_A, "execute"), (2, 3, COMMIT_A, "held"), (4, 5, CLAIM_B, "in_flight")
    ),
    "a stale read: back to in flight after a replay": history(
        (0, 1, CLAIM_A, "execute"), (2, 9, COMMIT_A, "held"), (3, 4, CLAIM_B, ("replay", "1")), (5, 6, CLAIM_B, "in_flight")
    ),
    "in flight, and nobody had claimed": history((0, 1, CLAIM_A, "in_flight")),
    "a commit of one that owns nothing": history((0, 1, CLAIM_A, "execute"), (2, 3, COMMIT_B, "held")),
    "an owner that is told stale": history((0, 1, CLAIM_A, "execute"), (2, 3, COMMIT_A, "stale")),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_claim_history_that_some_order_explains_is_accepted(name: str) -> None:
    assert is_linearizable(claim_register(), ACCEPTED[name])


@pytest.mark.parametrize("name", REJECTED)
def test_a_claim_history_that_no_order_explains_is_rejected(name: str) -> None:
    assert not is_linearizable(claim_register(), REJECTED[name])


def test_a_counter_admits_up_to_its_cap_and_then_stops() -> None:
    first, second, stop = ("execute", 1), ("execute", 2), "stop"
    counter = capped_counter(2)
    assert is_linearizable(counter, history((0, 9, "step", second), (1, 8, "step", first), (2, 10, "step", stop)))
    for wrong in (
        history((0, 1, "step", first), (2, 3, "step", first)),  # counted once for two
        history((0, 1, "step", second), (2, 3, "step", first)),  # backwards
        history((0, 1, "step", second)),  # a step that nobody took
        history((0, 1, "step", first), (2, 3, "step", stop)),  # stopped too early
        history((0, 9, "step", first), (0, 9, "step", second), (0, 9, "step", ("execute", 3))),  # above the cap
    ):
        assert not is_linearizable(counter, wrong)


def test_a_step_that_nobody_heard_of_may_have_been_counted() -> None:
    counter = capped_counter(5)
    assert is_linearizable(counter, history((0, None, "step", None), (1, 2, "step", ("execute", 2))))
    assert is_linearizable(counter, history((0, None, "step", None), (1, 2, "step", ("execute", 1))))
    assert not is_linearizable(counter, history((0, None, "step", None), (1, 2, "step", ("execute", 3))))


def test_each_key_is_a_history_of_its_own() -> None:
    ops = [Op(0, 1, CLAIM_A, "execute", key="k"), Op(2, 3, CLAIM_B, "execute", key="l")]
    assert unexplained(claim_register(), ops) == []
    assert unexplained(claim_register(), [*ops, Op(4, 5, CLAIM_A, "execute", key="l")]) == ["l"]


def test_it_agrees_with_trying_every_order() -> None:
    """The pruned search against all permutations, on small random histories."""
    chance, verdicts = random.Random(7), {True: 0, False: 0}
    for _ in range(600):
        ops = []
        for number in range(chance.randint(1, 5)):
            called = chance.randint(0, 6)
            returned = None if chance.random() < 0.15 else called + chance.randint(1, 5)
            asked = (
                ("claim", f"c{number}") if chance.random() < 0.7 else ("commit", f"c{chance.randint(0, number)}", "1")
            )
            said = ["execute", "in_flight", "in_doubt", ("replay", "1")] if asked[0] == "claim" else ["held", "stale"]
            ops.append(Op(called, returned, asked, chance.choice(said)))
        expected = by_brute_force(claim_register(), ops)
        verdicts[expected] += 1
        assert is_linearizable(claim_register(), ops) == expected, ops
    assert min(verdicts.values()) > 50


def by_brute_force(model: Model, ops: list[Op]) -> bool:
    unheard = [op for op in ops if op.returned is None]
    heard = [op for op in ops if op.returned is not None]
    for count in range(len(unheard) + 1):
        for taken in itertools.combinations(unheard, count):
            for order in itertools.permutations([*heard, *taken]):
                in_time = all(not later.end < earlier.called for earlier, later in itertools.combinations(order, 2))
                states = {model.initial}
                for op in order:
                    states = {after for state in states for after in model.step(state, op.input, op.heard)}
                if in_time and states:
                    return True
    return False


def test_a_long_history_of_many_at_once_is_checked_in_no_time() -> None:
    """Eight callers at a time, 2,000 operations: the memo keeps the search narrow."""
    ops = [Op(turn, turn + 7.5, "step", ("execute", turn + 1)) for turn in range(2000)]
    assert is_linearizable(capped_counter(2000), ops)
    ops[1000] = Op(1000, 1007.5, "step", ("execute", 1))
    assert not is_linearizable(capped_counter(2000), ops)
