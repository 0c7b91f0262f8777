"""Is a history of concurrent operations one that some order of them explains?

Wing and Gong's search (JPDC 1993) with Lowe's pruning (2017): a set of
operations that are done and the state they led to is never tried twice. Each
key is a history of its own, which is sound because linearizability is local
(Herlihy and Wing 1990).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

State = Hashable
Step = Callable[[Any, Any, Any], Iterator[State]]
"""(state, input, output) to every state that may follow; output UNKNOWN: nobody heard the answer."""


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Any = _Unknown()


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. called, returned: on one clock; returned None: its answer was never heard.

    key: histories of different keys are checked apart. An unheard operation may have happened at any time
    after its call, or never.
    """

    called: float
    returned: float | None
    input: Any
    output: Any
    key: str = ""

    @property
    def end(self) -> float:
        """When it was over; never, when its answer was not heard."""
        return math.inf if self.returned is None else self.returned

    @property
    def heard(self) -> Any:
        """Its answer, UNKNOWN when nobody heard it."""
        return UNKNOWN if self.returned is None else self.output


@dataclass(frozen=True, slots=True)
class Model:
    """A sequential object: where it begins, and what each operation may do to it."""

    initial: State
    step: Step


def is_linearizable(model: Model, history: Iterable[Op]) -> bool:
    """True when some order of the operations, each between its call and its return, explains all answers."""
    ops = sorted(history, key=lambda op: (op.called, op.end))
    wanted = sum(1 << index for index, op in enumerate(ops) if op.returned is not None)
    if not wanted:
        return True
    seen: set[tuple[int, State]] = {(0, model.initial)}
    trail = [_followers(model, ops, 0, model.initial)]
    while trail:
        found = next(trail[-1], None)
        if found is None:
            trail.pop()
        elif found not in seen:
            done, state = found
            if done & wanted == wanted:
                return True
            seen.add(found)
            trail.append(_followers(model, ops, done, state))
    return False


def _followers(model: Model, ops: list[Op], done: int, state: State) -> Iterator[tuple[int, State]]:
    """What may be next: each operation that was called before every other open one had returned."""
    first = (~done & (done + 1)).bit_length() - 1
    soonest = math.inf
    candidates = []
    for index in range(first, len(ops)):
        if done >> index & 1:
            continue
        op = ops[index]
        if op.called > soonest:
            break
        soonest = min(soonest, op.end)
        candidates.append(index)
    for index in candidates:
        if ops[index].called <= soonest:
            for after in model.step(state, ops[index].input, ops[index].heard):
                yield done | 1 << index, after


def unexplained(model: Model, history: Iterable[Op]) -> list[str]:
    """The keys whose history no order explains."""
    by_key: dict[str, list[Op]] = {}
    for op in history:
        by_key.setdefault(op.key, []).append(op)
    return sorted(key for key, ops in by_key.items() if not is_linearizable(model, ops))


# ---- Models -------------------------------------------------------------------


def capped_counter(cap: int) -> Model:
    """Steps of a run with max_steps = cap. The state is the number of steps.

    Input "step"; output ("execute", number of the step) up to the cap, then "stop".
    """

    def step(steps: int, _: Any, output: Any) -> Iterator[State]:
        if output is UNKNOWN:
            yield min(steps + 1, cap)
        elif output == "stop":
            if steps >= cap:
                yield steps
        elif steps < cap and output == ("execute", steps + 1):
            yield steps + 1

    return Model(0, step)


def claim_register() -> Model:
    """The record of one effect key. The state is ("free",), ("claimed", call), ("in_doubt", call) or ("committed", value).

    ("claim", call)          "execute", "in_flight", "in_doubt" or ("replay", value). A lease may end at any time.
    ("commit", call, value)  "held", or "stale" when the record is no longer this call's.
    """

    def claim(state: tuple[str, ...], call: str, output: Any) -> Iterator[State]:
        kind = state[0]
        if kind == "free" and output in ("execute", UNKNOWN):
            yield ("claimed", call)
        elif kind == "claimed" and output == "in_flight":
            yield state
        elif kind in ("claimed", "in_doubt") and output == "in_doubt":
            yield ("in_doubt", state[1])
        elif kind == "committed" and output == ("replay", state[1]) or output is UNKNOWN:
            yield state

    def commit(state: tuple[str, ...], call: str, value: str, output: Any) -> Iterator[State]:
        is_owner = state[0] in ("claimed", "in_doubt") and state[1] == call
        if is_owner and output in ("held", UNKNOWN):
            yield ("committed", value)
        elif not is_owner and output in ("stale", UNKNOWN):
            yield state

    def step(state: tuple[str, ...], asked: tuple[str, ...], output: Any) -> Iterator[State]:
        if asked[0] == "claim":
            return claim(state, asked[1], output)
        return commit(state, asked[1], asked[2], output)

    return Model(("free",), step)
