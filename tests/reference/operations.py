"""Model calls that cost money (`charge`, `settle`) and handoffs (SPEC 2.7)."""

from __future__ import annotations

from tests.reference.after import After
from tests.reference.canonical import Misuse, dumps, normal
from tests.reference.state import Answer, Family, Operation, Params, Run

PATH_MAX = 128


class Operations(After):
    """Operations with an op id: a resend gets the first answer and counts once."""

    def once(self, asks: Params, what: tuple[str, ...]) -> tuple[Operation, Answer | None]:
        """The operation of this op id, and its answer when a resend only repeats it.

        The same rule as for call ids (SPEC 2.2): `stop` or `wait` if the run has ended or
        is paused, else the first answer if that was `continue` or `deny`, else judged again.
        """
        path, op_id = self.lineage(asks["run"])[0], asks.get("op_id")
        asked = Operation((path, *what), path)
        root = self.runs.get(path.split("/")[0])
        known = root.operations.get(op_id) if root and op_id is not None else None
        if known is None:
            return asked, None
        if known.what != asked.what:
            raise Misuse("call_conflict")
        if known.answer["action"] not in ("continue", "deny"):
            return known, None
        return known, self.halted(self.find(path), what[0]) or known.answer

    def remember(self, asks: Params, asked: Operation, answer: Answer) -> Answer:
        asked.answer = answer
        if asks.get("op_id") is not None:
            self.root_of(asked.run).operations[asks["op_id"]] = asked
        return answer

    def halted(self, family: Family, kind: str) -> Answer | None:
        """Steps 2 and 3, for operations without a tool."""
        reason = self.terminal_reason(family)
        if reason:
            return {"action": "stop", "reason": reason}
        scopes = {"all", "handoffs"} if kind == "handoff" else {"all"}
        reason = "frozen" if family.blocked else self.waiting(family, scopes)
        return {"action": "wait", "reason": reason} if reason else None

    # ---- Money -------------------------------------------------------------

    def charge(self, asks: Params) -> Answer:
        """Steps 1 to 4 without the step cap; a reservation is held until it is settled."""
        asked, answer = self.once(asks, ("charge",))
        if answer:
            return answer
        if self.too_deep(asked.run):
            return {"action": "deny", "reason": "handoff_depth"}
        family = self.enter(asked.run)
        if not asked.usage_counted:
            self.use(family, asks.get("usage"))
            asked.usage_counted = True
        answer = self.halted(family, "charge") or self.capped(family, asks.get("reserve"), counts_steps=False)
        if answer is None:
            asked.held = self.hold(family, asks.get("reserve"))
            answer = {"action": "continue"}
        return self.remember(asks, asked, answer)

    def settle(self, tells: Params) -> Answer:
        """Give the reservation of a charge back and count what was used instead."""
        root = self.runs.get(self.lineage(tells["run"])[-1])
        asked = root.operations.get(tells["op_id"]) if root else None
        if asked is None or asked.what != (tells["run"], "charge") or asked.answer["action"] != "continue":
            raise Misuse("unknown_operation")
        if asked.settle_answer is None:
            family = self.find(asked.run)
            self.release(family, asked.held)
            self.use(family, tells.get("usage"))
            asked.settle_answer = self.state(family)
        return asked.settle_answer

    # ---- Handoffs (SPEC 2.7) -----------------------------------------------

    def handoff(self, asks: Params) -> Answer:
        """Steps 1 to 4 without the step cap, then the path of the tree."""
        source, target, state = asks["from"], asks["to"], dumps(normal(asks.get("state")))
        asked, answer = self.once(asks, ("handoff", source, target, state))
        if answer:
            return answer
        if self.too_deep(asked.run):
            return {"action": "deny", "reason": "handoff_depth"}
        family = self.enter(asked.run)
        answer = self.halted(family, "handoff") or self.capped(family, None, counts_steps=False)
        if answer is None:
            assert family.own is not None
            answer = self.pass_on(family.own, source, target, state, asked)
        return self.remember(asks, asked, answer)

    def pass_on(self, run: Run, source: str, target: str, state: str, asked: Operation) -> Answer:
        """Append the new holder to the path of the tree, unless that closes a cycle or passes a cap."""
        root = self.root_of(run.path)
        path = root.handoff_path or [(source, state)]
        reason = self.refused_handoff(root, [*path, (target, state)])
        if reason and not self.observes(run):
            return self.refuse(run, source, reason, asked)
        root.handoffs += 1
        root.handoff_path = [*path, (target, state)][-PATH_MAX:]
        return {"action": "continue"}

    def refused_handoff(self, root: Run, path: list[tuple[str, str]]) -> str | None:
        """Two equal blocks at the end are a cycle; then the number of handoffs, then of returns."""
        for length in range(2, len(path) // 2 + 1):
            if path[-length:] == path[-2 * length : -length]:
                return "handoff_cycle"
        max_handoffs, max_returns = root.limits["max_handoffs"], root.limits["max_role_returns"]
        if max_handoffs is not None and root.handoffs + 1 > max_handoffs:
            return "handoff_cap"
        times = [agent for agent, _ in path[:-1]].count(path[-1][0])
        return "handoff_cap" if max_returns is not None and times > max_returns else None
