"""The engine: one async method per operation of SPEC 4, over any store.

It holds no state of runs. What it remembers are caches that may be lost at any
time: a run's policy and a call's tool. When a script sees that a cache was
wrong it writes nothing and says what is right, and the engine asks once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from msgspec import UNSET

from guardd import canonical
from guardd.engine.audit import AuditStream
from guardd.engine.calls import Calls
from guardd.engine.config import EngineConfig
from guardd.engine.context import Context
from guardd.engine.deny_rules import DenyRules
from guardd.engine.export import export
from guardd.engine.link import Link
from guardd.engine.shaping import amounts
from guardd.engine.sweep import Sweep
from guardd.engine.tokens import Tokens
from guardd.model import ids
from guardd.model.answers import Answer
from guardd.model.errors import BadArgument, ChangeRequired, ClockNotAllowed
from guardd.model.limits import changes_text, check_limits, parse_limits
from guardd.model.reasons import FREEZE_SCOPES, RESUME_CHANGES
from guardd.protocol import operations as ops
from guardd.scripts import stubs
from guardd.scripts.bind import Map
from guardd.store.base import Store

Reply = dict[str, Any]

RUNS_LOOKED_AT = 1000
"""How many of the newest runs a search by status, reason or label looks at."""


class Engine:
    """The guard over one store.

    Args:
        store:  where the state lives; its scripts decide.
        config: policies, tool rules, retention.
    """

    def __init__(self, store: Store, config: EngineConfig | None = None) -> None:
        link = Link(store)
        self.context = Context(link, config or EngineConfig())
        self.rules = DenyRules(link, self.context.keys)
        self.tokens = Tokens(link, self.context.keys)
        self.audit_stream = AuditStream(link, self.context.keys)
        self.reader = self.context.reader
        self.sweep = Sweep(self.context)
        calls = Calls(self.context, self.rules, self.sweep)
        self.before, self.after, self.renew, self.resolve = (
            calls.before,
            calls.after,
            calls.renew,
            calls.resolve,
        )
        self._handlers = {name: getattr(self, name) for name in ops.OPERATIONS}

    async def call(
        self, name: str, params: Mapping[str, Any], *, role: str = "operator"
    ) -> Answer | Reply | list[Reply]:
        """Any operation by name, with parameters as they come over the wire.

        Raises: BadArgument: unknown operation or bad parameters. Whatever the operation raises.
        """
        operation = ops.OPERATIONS.get(name)
        if operation is None:
            raise BadArgument("no such operation", field="method", value=name, limit=", ".join(ops.OPERATIONS))
        request = ops.parse_params(operation, params)
        if request.at_ms is not None and not self.context.config.virtual_clock:
            raise ClockNotAllowed(
                "this guard runs on the server's clock; leave at_ms out", field="at_ms", value=request.at_ms
            )
        if isinstance(request, ops.RunParams):
            ids.check_run(request.run)
        if name in ("open", "resolve"):
            return await self._handlers[name](request, role=role)  # type: ignore[no-any-return]
        return await self._handlers[name](request)  # type: ignore[no-any-return]

    async def probe(self) -> None:
        """Sends a script that finds nothing to the store and back.

        Raises: StoreUnavailable.
        """
        key = self.context.keys.global_op("probe")
        await self.context.link.invoke(
            stubs.look(op_key=key, now_ms=None, wait_ms=None, channel=self.context.keys.events)
        )

    # ---- Runs ------------------------------------------------------------------

    async def open(self, request: ops.Open, *, role: str = "operator") -> Answer:
        """Make a run known; its first open sets policy and limits (SPEC 2.10)."""
        named = ""
        if request.policy is not None:
            if request.policy not in self.context.config.policies:
                raise BadArgument(
                    "no such policy",
                    field="policy",
                    value=request.policy,
                    limit=", ".join(self.context.config.policies),
                )
            named = self.context.policy_text(request.policy)
        changes = changes_text(check_limits(request.limits or {}))
        policy = request.policy or self.context.policy_name(request.run)
        reply = await self.context.ask(
            stubs.open_run(
                **self.context.for_known_run(request),
                birth_record=self.context.birth(policy),
                known_epoch=request.epoch or "",
                defaults=self.context.policy_text(policy),
                policy=request.policy or "",
                named=named,
                changes=Map(changes),
                may_loosen="1" if role == "operator" else "",
                version=request.progress_version,
                labels=_labels(request.labels),
                tools=_tools(request.tools),
            ),
            request,
        )
        answer = await self.context.answer(reply, request.run)
        if stored := reply.extras.get("policy"):
            self.context.learn_policy(request.run, stored)
            answer.policy = stored
            answer.limits = parse_limits(reply.extras.get("limits", ""))
        if version := reply.extras.get("progress_version"):
            answer.progress_version = int(version)
        answer.read_only = [tool for tool in request.tools or () if self.context.config.tools.find(tool)[1].read_only]
        return answer

    async def finish(self, request: ops.Finish) -> Answer:
        """End the run from outside; a framework's own cap becomes `framework_cap` (SPEC 2.8)."""
        return await self._stop(request, "finish", request.reason, request.note)

    async def kill(self, request: ops.Kill) -> Answer:
        """End the run and all its sub-runs now, whether the guard knew them or not (SPEC 2.8)."""
        ids.check_reason(request.reason)
        return await self._stop(request, "kill", request.reason, request.note)

    async def _stop(self, request: ops.RunParams, ended_by: str, why: str, note: str | None) -> Answer:
        reply = await self.context.ask(
            stubs.stop(**self.context.for_run(request), ended_by=ended_by, why=why, note=note or ""), request
        )
        return await self.context.answer(reply, request.run)

    async def freeze(self, request: ops.Freeze) -> Answer:
        """Hold a run; the scopes replace those of the freeze before (SPEC 2.8)."""
        scopes = [scope.strip() for scope in request.scope.split(",")]
        if unknown := [scope for scope in scopes if scope not in FREEZE_SCOPES]:
            raise BadArgument("no such scope", field="scope", value=unknown[0], limit=", ".join(FREEZE_SCOPES))
        reply = await self.context.ask(
            stubs.freeze(**self.context.for_run(request), scope=",".join(scopes), note=request.note or ""),
            request,
        )
        return await self.context.answer(reply, request.run)

    async def resume(self, request: ops.Resume) -> Answer:
        """Let a run go on after a named change (SPEC 2.8).

        Raises: ChangeRequired, UnknownRun, NotResumable, LimitsNeeded.
        """
        if request.change not in RESUME_CHANGES:
            raise ChangeRequired(
                "a resume names what is different now",
                field="change",
                value=request.change,
                limit=", ".join(RESUME_CHANGES),
            )
        changes = changes_text(check_limits(request.limits or {}))
        reply = await self.context.ask(
            stubs.resume(
                **self.context.for_known_run(request),
                change=request.change,
                changes=Map(changes),
                note=request.note or "",
            ),
            request,
        )
        return await self.context.answer(reply, request.run)

    async def checkpoint(self, request: ops.Checkpoint) -> Answer:
        """Store the last safe point for the envelope (SPEC 2.9)."""
        if request.op_id is not None:
            ids.check_call_id(request.op_id, field="op_id")
        reply = await self.context.ask(
            stubs.checkpoint(**self.context.for_run(request), version=request.version, ref=request.ref or ""),
            request,
        )
        return await self.context.answer(reply, request.run)

    async def handoff(self, request: ops.Handoff) -> Answer:
        """Control goes from one agent to another; circles are refused (SPEC 2.7)."""
        ids.check_call_id(request.op_id, field="op_id")
        ids.check_name("from", request.from_)
        ids.check_name("to", request.to)
        state = "-" if request.state is UNSET else canonical.state_digest(request.state)
        reply = await self.context.ask(
            stubs.handoff(
                calls_key=self.context.keys.calls(request.run),
                marks_key=self.context.keys.marks(request.run),
                **self.context.for_run(request),
                op_id=request.op_id,
                giver=request.from_,
                receiver=request.to,
                state=state,
            ),
            request,
        )
        return await self.context.answer(reply, request.run)

    # ---- Budgets ---------------------------------------------------------------

    async def charge(self, request: ops.Charge) -> Answer:
        """Count or reserve the usage of a model call before it is made (SPEC 2.10)."""
        ids.check_call_id(request.op_id, field="op_id")
        reply = await self.context.ask(
            stubs.charge(
                calls_key=self.context.keys.calls(request.run),
                **self.context.for_run(request),
                op_id=request.op_id,
                usage_map=amounts(request.usage),
                reserve=amounts(request.reserve),
            ),
            request,
        )
        return await self.context.answer(reply, request.run)

    async def settle(self, request: ops.Settle) -> Answer:
        """What a charge really used; its reservation is let go (SPEC 2.10).

        Raises: UnknownOperation: no charge of this op_id was granted in this run.
        """
        ids.check_call_id(request.op_id, field="op_id")
        reply = await self.context.ask(
            stubs.settle(
                calls_key=self.context.keys.calls(request.run),
                **self.context.for_known_run(request),
                op_id=request.op_id,
                usage_map=amounts(request.usage),
            ),
            request,
        )
        return await self.context.answer(reply, request.run)

    # ---- For all runs; reading -------------------------------------------------

    async def deny_rule(self, request: ops.DenyRule) -> Answer:
        """Set or remove an emergency rule for all runs (SPEC 2.8)."""
        await self.rules.change(request)
        return Answer(action="continue")

    async def confirm(self, request: ops.Confirm) -> Answer:
        """The store may be trusted as it is now; every daemon grants again within a second (SPEC 5)."""
        await self.context.link.store.confirm()
        return Answer(action="continue")

    async def forget(self, request: ops.Forget) -> Answer:
        """Erase arguments, results and trace of the run's tree; counters and the ledger's digests stay.

        Raises: UnknownRun.
        """
        await self.reader.inspect(request.run, request.at_ms)
        commands: list[Any] = [("DEL", self.context.keys.trace(request.run))]
        commands += [
            ("HDEL", self.context.keys.run(run), "stop_args") for run in (*ids.parents(request.run), request.run)
        ]
        commands += [("HDEL", key, "value", "late_value") for key in await self.reader.effect_keys(request.run)]
        await self.context.link.execute(*commands)
        return Answer(action="continue")

    async def inspect(self, request: ops.Inspect) -> Reply:
        """Counters, limits, window, what is in flight, and the envelope of one run.

        Raises: UnknownRun.
        """
        return await self.reader.inspect(request.run, request.at_ms)

    async def runs(self, request: ops.Runs) -> list[Reply]:
        """Recent root runs, newest first."""
        found = await self.reader.runs(
            RUNS_LOOKED_AT if request.status or request.reason or request.label else request.limit,
            request.waiting, request.run_prefix or "",
        )  # fmt: skip
        return [run for run in found if _fits(run, request)][: request.limit]

    async def trace(self, request: ops.Trace) -> list[Reply]:
        """Trace entries of a run and its sub-runs, oldest first.

        Raises: BadArgument: newest together with after.
        """
        if request.newest and request.after:
            raise BadArgument("newest looks from the end, after from an entry", field="after", value=request.after)
        return await self.reader.trace(request.run, request.limit, request.after, is_newest=request.newest)

    async def export(self, request: ops.Export) -> Reply:
        """A root run's tree as a document that can be played again.

        Raises: UnknownRun. BadArgument: a sub-run.
        """
        if request.run != ids.root(request.run):
            raise BadArgument(
                "a tree is exported by its root", field="run", value=request.run, limit=ids.root(request.run)
            )
        return await export(self.context, request.run)

    async def ledger(self, request: ops.Ledger) -> list[Reply]:
        """Effects that are claimed or in doubt."""
        return await self.reader.ledger(request.in_doubt, request.limit, request.at_ms, request.run_prefix or "")

    # ---- Who may ask -----------------------------------------------------------

    async def token_new(self, request: ops.TokenNew) -> Reply:
        """Make a token; its text is answered this once."""
        return await self.tokens.make(request)

    async def deny_rules(self, _: ops.DenyRules) -> list[Reply]:
        """The emergency rules in force, by id."""
        await self.rules.read()
        return self.rules.listed()

    async def token_list(self, _: ops.TokenList) -> list[Reply]:
        """All tokens, without their secrets."""
        return await self.tokens.listed()

    async def token_revoke(self, request: ops.TokenRevoke) -> Reply:
        """Take a token away."""
        return await self.tokens.revoke(request.id)

    async def audit(self, request: ops.Audit) -> list[Reply]:
        """Newest entries of the audit, newest first."""
        return await self.audit_stream.newest(request.limit)


def _fits(run: Reply, request: ops.Runs) -> bool:
    """What an operator sees as frozen is a running run with a freeze."""
    status = "frozen" if run["freeze"] and run["status"] == "running" else run["status"]
    name, is_exact, value = (request.label or "").partition("=")
    return (
        request.status in (None, status)
        and request.reason in (None, run["reason"])
        and (not name or (name in run["labels"] and (not is_exact or run["labels"][name] == value)))
    )


def _labels(labels: Mapping[str, str] | None) -> str:
    """Labels as `name=value` with both percent-escaped, so that they stay one field."""
    ids.check_labels(labels or {})
    return " ".join(f"{quote(name)}={quote(value)}" for name, value in sorted((labels or {}).items()))


def _tools(tools: list[str] | None) -> str:
    for tool in tools or ():
        ids.check_name("tools", tool)
    return " ".join(quote(tool) for tool in tools or ())
