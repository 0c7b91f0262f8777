"""Plays operations on a guard and on the reference, and tells where their answers differ."""

from __future__ import annotations

from typing import Any, Protocol

from tests.reference.model import ReferenceGuard

Answer = dict[str, Any]
COMPARED = ("error", "action", "reason", "retry_after_ms", "claim")


class Guard(Protocol):
    """Anything that answers operations; `at_ms` comes with the parameters, misuse is `{"error": name}`."""

    async def call(self, op: str, params: dict[str, Any]) -> Answer: ...


class AsGuard:
    """A reference in the place of a guard, to try the comparison itself."""

    def __init__(self, reference: ReferenceGuard) -> None:
        self.reference = reference

    async def call(self, op: str, params: dict[str, Any]) -> Answer:
        return self.reference.call(op, params, params["at_ms"])


def shown(answer: Answer) -> Answer:
    """What of an answer the rules fix; the other members (hint, evidence, remaining) are free.

    Of `claim` only `stale` is fixed: a guard may also say that a claim was renewed.
    """
    fixed = {name: answer[name] for name in COMPARED if answer.get(name) is not None}
    if fixed.get("claim") != "stale":
        fixed.pop("claim", None)
    return fixed


async def compare(guard: Guard, reference: ReferenceGuard, ops: list[dict[str, Any]]) -> list[str]:
    """Play `ops` (shaped as in scenario files, `after` with its run) on both.

    Returns: a line for each operation that was answered differently: its number,
    the operation, what the reference says, what the guard says.
    """
    differences = []
    for number, operation in enumerate(ops):
        params = {name: value for name, value in operation.items() if name != "op"}
        expected = shown(reference.call(operation["op"], dict(params), params["at_ms"]))
        actual = shown(await guard.call(operation["op"], dict(params)))
        if actual != expected:
            differences.append(f"op {number} {operation}: expected {expected}, actual {actual}")
    return differences
