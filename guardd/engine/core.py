"""The engine: one async method per operation of SPEC 4, over any store.

It holds no state of runs. What it remembers are caches that may be lost at any
time: a run's policy and a call's tool. When a script sees that a cache was
wrong it writes nothing and says what is right, and the engine asks once more.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from msgspec import UNSET

from guardd import canonical
from guardd.engine.config import EngineConfig
from guardd.engine.deny_rules import DenyRules
from guardd.engine.reading import Reader
from guardd.engine.shaping import Effect, Shaper, amounts, pairs, text
from guardd.keys import Keys
from guardd.model import ids
from guardd.model.answers import Answer
from guardd.model.errors import BadArgument, ChangeRequired, ClockNotAllowed, NotAllowed, StoreUnavailable
from guardd.model.limits import Policy, changes_text, check_limits, parse_limits
from guardd.model.reasons import FREEZE_SCOPES, RESUME_CHANGES, RETRY_CHANGES, hint
from guardd.protocol import operations as ops
from guardd.scripts import stubs
from guardd.scripts.stubs import Invocation, Map, packed
from guardd.engine.link import Link
from guardd.store.base import Store

_CACHED_MAX = 65_536
_TURNS_MAX = 4
_REQUESTER_BYTES_MAX = 128

Reply = dict[str, Any]


class Engine:
    """The guard over one store.

    Args:
        store:  where the state lives; its scripts decide.
        config: policies, tool rules, retention.
    """

    def __init__(self, store: Store, config: EngineConfig | None = None) -> None:
        self.store = Link(store)
        self.config = config or EngineConfig()
        self.keys = Keys(self.config.prefix)
        self.shaper = Shaper(self.config)
        self.deny_rules = DenyRules(self.store, self.keys)
        self.reader = Reader(self.store, self.keys, self.config)
        self.rules_seen: set[str] = set()
        """Digests of rules that runs were made under and that differ from this engine's."""
        self._rules = self.config.rules_digest()
        self._settings = packed(
            {
                "run_ttl_ms": self.config.run_ttl_ms,
                "ledger_ttl_ms": self.config.ledger_ttl_ms,
                "trace_max": self.config.trace_max,
                "calls_max": self.config.calls_max,
                "holders_max": self.config.holders_max,
            }
        )
        self._policy_texts = {name: policy.text() for name, policy in self.config.policies.items()}
        self._policy_of: dict[str, str] = {}
        self._call_of: dict[str, tuple[str, str, str]] = {}
        self._listed: dict[str, int] = {}
        self._handlers = {name: getattr(self, name) for name in ops.OPERATIONS}

    async def call(self, name: str, params: Mapping[str, Any], *, role: str = "operator") -> Answer | Reply | list[Reply]:
        """Any operation by name, with parameters as they come over the wire.

        Raises: BadArgument: unknown operation or bad parameters. Whatever the operation raises.
        """
        operation = ops.OPERATIONS.get(name)
        if operation is None:
            raise BadArgument("no such operation", field="method", value=name, limit=", ".join(ops.OPERATIONS))
        request = ops.parse_params(operation, params)
        if request.at_ms is not None and not self.config.virtual_clock:
            raise ClockNotAllowed("this guard runs on the server's clock; leave at_ms out", field="at_ms", value=request.at_ms)
        if isinstance(request, ops.RunParams):
            ids.check_run(request.run)
        if name in ("open", "resolve"):
            return await self._handlers[name](request, role=role)  # type: ignore[no-any-return]
        return await self._handlers[name](request)  # type: ignore[no-any-return]

    # ---- Runs ------------------------------------------------------------------

    async def open(self, request: ops.Open, *, role: str = "operator") -> Answer:
        """Make a run known; its first open sets policy and limits (SPEC 2.10)."""
        named = ""
        if request.policy is not None:
            if request.policy not in self.config.policies:
                raise BadArgument("no such policy", field="policy", value=request.policy, limit=", ".join(self.config.policies))
            named = self._policy_texts[request.policy]
        changes = changes_text(check_limits(request.limits or {}))
        policy = request.policy or self._policy_name(request.run)
        reply = await self._run(
            stubs.open_run(
                trace_key=self.keys.trace(request.run),
                run_keys=self.keys.chain(request.run),
                now_ms=request.at_ms,
                settings=self._settings,
                channel=self.keys.events,
                birth=self._birth(policy, request),
                defaults=self._policy_texts[policy],
                run=request.run,
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
        answer = self._answer(reply)
        if stored := reply[2].get("policy"):
            self._remember(self._policy_of, request.run, stored)
            answer.policy = stored
            answer.limits = parse_limits(reply[2].get("limits", ""))
        if version := reply[2].get("progress_version"):
            answer.progress_version = int(version)
        answer.read_only = [tool for tool in request.tools or () if self.config.tools.find(tool)[1].read_only]
        return await self._with_envelope(answer, request.run)

    async def finish(self, request: ops.Finish) -> Answer:
        """End the run from outside; a framework's own cap becomes `framework_cap` (SPEC 2.8)."""
        return await self._stop(request, "finish", request.reason, request.note)

    async def kill(self, request: ops.Kill) -> Answer:
        """End the run and all its sub-runs now, whether the guard knew them or not (SPEC 2.8)."""
        ids.check_reason(request.reason)
        return await self._stop(request, "kill", request.reason, request.note)

    async def _stop(self, request: ops.RunParams, ended_by: str, why: str, note: str | None) -> Answer:
        reply = await self._run(
            stubs.stop(**self._for_run(request), ended_by=ended_by, why=why, note=note or ""), request
        )
        return await self._with_envelope(self._answer(reply), request.run)

    async def freeze(self, request: ops.Freeze) -> Answer:
        """Hold a run; the scopes replace those of the freeze before (SPEC 2.8)."""
        scopes = [scope.strip() for scope in request.scope.split(",")]
        if unknown := [scope for scope in scopes if scope not in FREEZE_SCOPES]:
            raise BadArgument("no such scope", field="scope", value=unknown[0], limit=", ".join(FREEZE_SCOPES))
        reply = await self._run(
            stubs.freeze(**self._for_run(request), scope=",".join(scopes), note=request.note or ""), request
        )
        return await self._with_envelope(self._answer(reply), request.run)

    async def resume(self, request: ops.Resume) -> Answer:
        """Let a run go on after a named change (SPEC 2.8).

        Raises: ChangeRequired, UnknownRun, NotResumable, LimitsNeeded.
        """
        if request.change not in RESUME_CHANGES:
            raise ChangeRequired(
                "a resume names what is different now", field="change", value=request.change, limit=", ".join(RESUME_CHANGES)
            )
        changes = changes_text(check_limits(request.limits or {}))
        reply = await self._run(
            stubs.resume(
                trace_key=self.keys.trace(request.run),
                run_keys=self.keys.chain(request.run),
                now_ms=request.at_ms,
                settings=self._settings,
                channel=self.keys.events,
                run=request.run,
                change=request.change,
                changes=Map(changes),
                note=request.note or "",
            ),
            request,
        )
        return self._answer(reply)

    async def checkpoint(self, request: ops.Checkpoint) -> Answer:
        """Store the last safe point for the envelope (SPEC 2.9)."""
        if request.op_id is not None:
            ids.check_call_id(request.op_id, field="op_id")
        reply = await self._run(
            stubs.checkpoint(**self._for_run(request), version=request.version, ref=request.ref or ""), request
        )
        return await self._with_envelope(self._answer(reply), request.run)

    async def handoff(self, request: ops.Handoff) -> Answer:
        """Control goes from one agent to another; circles are refused (SPEC 2.7)."""
        ids.check_call_id(request.op_id, field="op_id")
        ids.check_name("from", request.from_)
        ids.check_name("to", request.to)
        state = "-" if request.state is UNSET else canonical.state_digest(request.state)
        reply = await self._run(
            stubs.handoff(
                calls_key=self.keys.calls(request.run),
                marks_key=self.keys.marks(request.run),
                **self._for_run(request),
                op_id=request.op_id,
                giver=request.from_,
                receiver=request.to,
                state=state,
            ),
            request,
        )
        return await self._with_envelope(self._answer(reply), request.run)

    # ---- Budgets ---------------------------------------------------------------

    async def charge(self, request: ops.Charge) -> Answer:
        """Count or reserve the usage of a model call before it is made (SPEC 2.10)."""
        ids.check_call_id(request.op_id, field="op_id")
        reply = await self._run(
            stubs.charge(
                calls_key=self.keys.calls(request.run),
                **self._for_run(request),
                op_id=request.op_id,
                usage_map=amounts(request.usage),
                reserve=amounts(request.reserve),
            ),
            request,
        )
        return await self._with_envelope(self._answer(reply), request.run)

    async def settle(self, request: ops.Settle) -> Answer:
        """What a charge really used; its reservation is let go (SPEC 2.10).

        Raises: UnknownOperation: no charge of this op_id was granted in this run.
        """
        ids.check_call_id(request.op_id, field="op_id")
        reply = await self._run(
            stubs.settle(
                calls_key=self.keys.calls(request.run),
                trace_key=self.keys.trace(request.run),
                run_keys=self.keys.chain(request.run),
                now_ms=request.at_ms,
                settings=self._settings,
                channel=self.keys.events,
                run=request.run,
                op_id=request.op_id,
                usage_map=amounts(request.usage),
            ),
            request,
        )
        return await self._with_envelope(self._answer(reply), request.run)

    # ---- Calls -----------------------------------------------------------------

    async def before(self, request: ops.Before) -> Answer:
        """May this call run now? The rules of SPEC 2.2.

        Raises: CallConflict, ChangeRequired, EffectKeyMissing, RunLost, StoreUnavailable.
        """
        ids.check_call_id(request.call)
        ids.check_name("tool", request.tool)
        ids.check_name("agent", request.agent)
        client = _client(request.client)
        if request.retry is not None and request.retry.change not in RETRY_CHANGES:
            raise ChangeRequired(
                "a retry names what is different now", field="retry.change", value=request.retry.change,
                limit=", ".join(RETRY_CHANGES),
            )  # fmt: skip
        await self.deny_rules.ensure_fresh()
        tool, rule = self.config.tools.find(request.tool)
        normalised = canonical.normalise(request.args)
        effect = self.shaper.effect(request, tool, rule, normalised, ids.root(request.run))
        deny_rule = self.deny_rules.match(tool, request.run, request.at_ms)
        policy_name = self._policy_name(request.run)
        run, own_op = request.run, effect is not None and effect.scope == "run"
        for _ in range(_TURNS_MAX):
            policy = self._policy(policy_name)
            shaped = self.shaper.call(tool, rule, policy, normalised)
            seen = await self._look(effect, request.at_ms) if effect and effect.scope == "global" else {}
            invocation = stubs.before(
                calls_key=self.keys.calls(run),
                trace_key=self.keys.trace(run),
                marks_key=self.keys.marks(run),
                op_key=self.keys.op(run, effect.digest) if effect and own_op else self.keys.no_op(run),
                run_keys=self.keys.chain(run),
                now_ms=request.at_ms,
                settings=self._lease_settings(policy),
                channel=self.keys.events,
                birth=self._birth(policy_name, request),
                limits=policy.text(),
                run=run,
                call=request.call,
                client=client,
                agent=request.agent,
                tool=tool,
                fp=shaped.short,
                full_fp=shaped.fingerprint,
                target=shaped.target,
                args=shaped.trace_args,
                key=effect.key if effect else "",
                effect=_effect_map(effect, seen),
                rule=self.shaper.rule_map(tool, rule, policy),
                retry=request.retry.change if request.retry else "",
                version=request.progress_version,
                usage_map=amounts(request.usage),
                reserve=amounts(request.reserve),
                deny_rule=deny_rule,
            )
            action, reason, extras, _ = reply = await self._run(invocation, request, effect=effect)
            if action == "policy":
                policy_name = reason
                self._remember(self._policy_of, run, reason)
                continue
            if action == "execute" and effect and effect.scope == "global":
                if not await self._claim(effect, request, tool, rule.on_in_doubt == "reclaim", shaped.fingerprint, policy):
                    continue
            if action == "execute":
                self._remember(self._call_of, request.call, (tool, effect.digest if effect else "", effect.scope if effect else ""))
            answer = self._answer(reply)
            if action == "replay":
                _add_result(answer, extras, seen)
            if effect:
                answer.provider_key = effect.provider_key
            return await self._with_envelope(answer, run)
        raise StoreUnavailable("the record of this call kept changing; send it again under the same call id")

    async def _look(self, effect: Effect, at_ms: int | None) -> Reply:
        """What a global record says now (SPEC 2.6, first of three scripts)."""
        reply = await self.store.invoke(stubs.look(op_key=self.keys.global_op(effect.digest), now_ms=at_ms))
        return {"state": text(reply[0]), **pairs(reply[2:])}

    async def _claim(
        self, effect: Effect, request: ops.Before, tool: str, may_reclaim: bool, fingerprint: str, policy: Policy
    ) -> bool:
        """Claims a global key for an admitted call; on a loss the admission is withdrawn (SPEC 2.6)."""
        key = self.keys.global_op(effect.digest)
        reply = await self.store.invoke(
            stubs.claim(
                op_key=key,
                now_ms=request.at_ms,
                lease_ms=int(policy.limits["claim_lease_ms"] or 0),
                owner=request.call,
                fp=fingerprint,
                run=request.run,
                agent=request.agent,
                tool=tool,
                key=effect.key,
                reclaim="1" if may_reclaim else "",
            )
        )
        if text(reply[0]) == "won":
            return True
        await self.store.invoke(
            stubs.withdraw(
                calls_key=self.keys.calls(request.run),
                trace_key=self.keys.trace(request.run),
                marks_key=self.keys.marks(request.run),
                run_keys=self.keys.chain(request.run),
                now_ms=request.at_ms,
                settings=self._settings,
                channel=self.keys.events,
                run=request.run,
                call=request.call,
            )
        )
        return False

    async def after(self, request: ops.After) -> Answer:
        """What became of an admitted call (SPEC 2.3).

        Raises: UnknownCall: the call was never admitted in this run.
        """
        ids.check_call_id(request.call)
        tool, digest, scope = self._call_of.get(request.call, ("", "", ""))
        global_claim = ""
        for _ in range(_TURNS_MAX):
            _, rule = self.config.tools.find(tool)
            verdict = self.shaper.verdict(request.status, request.value, rule)
            value, value_map = self.shaper.result(request.value)
            reply = await self._run(
                stubs.after(
                    calls_key=self.keys.calls(request.run),
                    trace_key=self.keys.trace(request.run),
                    marks_key=self.keys.marks(request.run),
                    op_key=self.keys.op(request.run, digest) if scope == "run" else self.keys.no_op(request.run),
                    run_keys=self.keys.chain(request.run),
                    now_ms=request.at_ms,
                    settings=self._settings,
                    channel=self.keys.events,
                    run=request.run,
                    call=request.call,
                    tool=tool,
                    op_digest=digest,
                    status=request.status,
                    verdict=verdict,
                    committed={None: "", True: "1", False: "0"}[request.side_effect_committed],
                    version=request.progress_version,
                    retry_ms=request.retry_after_ms,
                    reading=self.shaper.reading(request.status, verdict, request.value, rule),
                    is_exempt="1" if self.shaper.is_round_exempt(rule, self._policy(self._policy_name(request.run))) else "",
                    usage_map=amounts(request.usage),
                    value=value if digest else "",
                    value_map=value_map,
                    operation_id=request.operation_id or "",
                    global_claim=global_claim,
                ),
                request,
            )
            if reply[0] == "call":
                tool, digest, scope = reply[1], *reply[3]
                continue
            if reply[0] == "global":
                report = await self.store.invoke(
                    stubs.report(
                        op_key=self.keys.global_op(digest),
                        now_ms=request.at_ms,
                        settings=self._settings,
                        owner=request.call,
                        outcome=reply[1],
                        value=value,
                        value_map=value_map,
                        operation_id=request.operation_id or "",
                    )
                )
                global_claim = text(report[0])
                continue
            self._call_of.pop(request.call, None)
            return await self._with_envelope(self._answer(reply), request.run)
        raise StoreUnavailable("the record of this call kept changing; send the result again")

    async def renew(self, request: ops.Renew) -> Answer:
        """The tool still runs: keep its claim and hear whether to stop (SPEC 2.6)."""
        ids.check_call_id(request.call)
        _, digest, scope = self._call_of.get(request.call, ("", "", ""))
        lease_ms = request.lease_ms or int(self._policy(self._policy_name(request.run)).limits["claim_lease_ms"] or 0)
        global_claim = ""
        for _ in range(_TURNS_MAX):
            reply = await self._run(
                stubs.renew(
                    calls_key=self.keys.calls(request.run),
                    op_key=self.keys.op(request.run, digest) if scope == "run" else self.keys.no_op(request.run),
                    run_keys=self.keys.chain(request.run),
                    now_ms=request.at_ms,
                    settings=self._settings,
                    channel=self.keys.events,
                    run=request.run,
                    call=request.call,
                    op_digest=digest,
                    lease_ms=lease_ms,
                    usage_map=amounts(request.usage),
                    global_claim=global_claim,
                ),
                request,
            )
            if reply[0] == "call":
                digest, scope = reply[3]
                continue
            if reply[0] == "global":
                extended = await self.store.invoke(
                    stubs.extend(
                        op_key=self.keys.global_op(digest), now_ms=request.at_ms, owner=request.call, lease_ms=lease_ms
                    )
                )
                global_claim = text(extended[0])
                continue
            return await self._with_envelope(self._answer(reply), request.run)
        raise StoreUnavailable("the record of this call kept changing; renew it again")

    async def resolve(self, request: ops.Resolve, *, role: str = "operator") -> Answer:
        """An operator, or a worker's check where the tool rule says `verify`, settles an effect in doubt (SPEC 2.6).

        Raises: InFlight, AlreadyCommitted, UnknownOperation, NotAllowed.
        """
        ids.check_name("tool", request.tool)
        tool, rule = self.config.tools.find(request.tool)
        if role != "operator" and not rule.verify:
            raise NotAllowed(f"resolving {tool} is the operator's; its tool rule does not say verify", field="tool", value=tool)
        scope = "global" if "global" in (rule.effect_scope, request.scope) else "run"
        effect = self.shaper.record(ids.root(request.run), tool, request.idempotency_key, scope)
        value, value_map = self.shaper.result(request.value)
        key = self.keys.global_op(effect.digest) if scope == "global" else self.keys.op(request.run, effect.digest)
        reply = await self._run(
            stubs.resolve(
                op_key=key,
                now_ms=request.at_ms,
                settings=self._settings,
                state=request.state,
                names=packed({"run": request.run, "tool": quote(tool, safe="/:.-_"), "scope": scope}),
                key=effect.key,
                value=value,
                value_map=value_map,
                operation_id=request.operation_id or "",
                note=request.note or "",
            ),
            request,
            after=[
                ("ZREM", self.keys.doubt, key),
                ("HSET", self.keys.calls(request.run), f"e:{effect.digest}", scope),
                ("PEXPIRE", self.keys.calls(request.run), self.config.run_ttl_ms),
            ],
        )
        return self._answer(reply)

    # ---- For all runs; reading -------------------------------------------------

    async def deny_rule(self, request: ops.DenyRule) -> Answer:
        """Set or remove an emergency rule for all runs (SPEC 2.8)."""
        await self.deny_rules.change(request)
        return Answer(action="continue")

    async def inspect(self, request: ops.Inspect) -> Reply:
        """Counters, limits, window, what is in flight, and the envelope of one run.

        Raises: UnknownRun.
        """
        return await self.reader.inspect(request.run, request.at_ms)

    async def runs(self, request: ops.Runs) -> list[Reply]:
        """Recent root runs, newest first."""
        return await self.reader.runs(request.limit, request.waiting)

    async def trace(self, request: ops.Trace) -> list[Reply]:
        """Trace entries of a run and its sub-runs, oldest first."""
        return await self.reader.trace(request.run, request.limit, request.after)

    async def ledger(self, request: ops.Ledger) -> list[Reply]:
        """Effects that are claimed or in doubt."""
        return await self.reader.ledger(request.in_doubt, request.limit, request.at_ms)

    # ---- Inside ----------------------------------------------------------------

    def _for_run(self, request: ops.RunParams) -> dict[str, Any]:
        """What every script takes that may make runs."""
        policy = self._policy_name(request.run)
        return {
            "trace_key": self.keys.trace(request.run),
            "run_keys": self.keys.chain(request.run),
            "now_ms": request.at_ms,
            "settings": self._settings,
            "channel": self.keys.events,
            "birth": self._birth(policy, request),
            "limits": self._policy(policy).text(),
            "run": request.run,
        }

    def _birth(self, policy: str, request: ops.RunParams) -> Map:
        return Map(
            f"policy={policy} epoch={secrets.token_hex(6)} rules={self._rules}"
            + (f" known_epoch={quote(request.epoch)}" if request.epoch else " known_epoch=")
        )

    def _lease_settings(self, policy: Policy) -> Map:
        return Map(f"{self._settings} lease_ms={policy.limits['claim_lease_ms']}")

    def _policy_name(self, run: str) -> str:
        return self._policy_of.get(run, self.config.default_policy)

    def _policy(self, name: str) -> Policy:
        """A policy this engine does not know (another daemon's configuration) is judged by the default's members."""
        return self.config.policies.get(name) or self.config.policies[self.config.default_policy]

    @staticmethod
    def _remember(cache: dict[str, Any], name: str, value: Any) -> None:
        if len(cache) >= _CACHED_MAX:
            cache.clear()
        cache[name] = value

    async def _run(
        self, invocation: Invocation, request: ops.RunParams, *, effect: Effect | None = None, after: list[Any] | None = None
    ) -> tuple[str, str, Reply, tuple[str, ...]]:
        """Sends a script with the index commands that go along; returns action, reason, names and values, raw rest."""
        commands: list[Any] = []
        now_ms = request.at_ms if request.at_ms is not None else self.reader.now_ms()
        if effect is not None:
            key = self.keys.global_op(effect.digest) if effect.scope == "global" else self.keys.op(request.run, effect.digest)
            commands.append(("ZADD", self.keys.doubt, "NX", now_ms + 30_000, key))
        if now_ms - self._listed.get(request.run, -60_000) >= 60_000:
            self._remember(self._listed, request.run, now_ms)
            commands.append(("ZADD", self.keys.runs, now_ms, request.run))
        raw = await self.store.invoke(invocation, before=commands, after=after or [])
        action, reason = text(raw[0]), text(raw[1]) if len(raw) > 1 else ""
        if action in ("policy", "call", "global"):
            return action, reason, {}, tuple(text(each) for each in raw[2:])
        extras = pairs(raw[2:])
        if (rules := extras.get("rules")) and rules != self._rules:
            self.rules_seen.add(rules)
        return action, reason, extras, ()

    def _answer(self, reply: tuple[str, str, Reply, tuple[str, ...]]) -> Answer:
        action, reason, extras, _ = reply
        answer = Answer(action=action, reason=reason, epoch=extras.get("epoch", ""), claim=extras.get("claim", ""))
        if "limit" in extras or "observed" in extras or "steps" in extras or "deny_rule" in extras:
            answer.evidence = {
                name: ([int(step) for step in extras[name].split(",")] if name == "steps" else _number(extras[name]))
                for name in ("limit", "observed", "steps", "deny_rule", "ended_run")
                if extras.get(name)
            }
        if "retry_after_ms" in extras:
            answer.retry_after_ms = int(extras["retry_after_ms"])
        if "step" in extras:
            answer.step = int(extras["step"])
        if left := extras.get("remaining"):
            answer.remaining = {name: int(value) for name, value in (part.split("=") for part in left.split(" "))}
        if would := extras.get("would"):
            answer.would = [dict(zip(("action", "reason"), part.split(":"), strict=True)) for part in would.split(",")]
        if reason:
            answer.hint = hint(action, reason, answer.evidence, answer.retry_after_ms)
        return answer

    async def _with_envelope(self, answer: Answer, run: str) -> Answer:
        if answer.action == "stop":
            answer.envelope = await self.reader.envelope(run)
        return answer


def _number(value: str) -> Any:
    return int(value) if value.isdigit() else value


def _client(client: str | None) -> str:
    if client is None:
        return "-"
    if not 0 < len(client.encode()) <= _REQUESTER_BYTES_MAX:
        raise BadArgument("a client instance has a name", field="client", value=client, limit=f"1..{_REQUESTER_BYTES_MAX} bytes")
    return quote(client)


def _effect_map(effect: Effect | None, seen: Reply) -> Map:
    if effect is None:
        return Map("")
    record: dict[str, object] = {"scope": effect.scope, "digest": effect.digest}
    for name in ("state", "until_ms", "fp"):
        record[name] = seen.get(name)
    if "owner" in seen:
        record["owner"] = seen["owner"]
    return packed(record)


def _add_result(answer: Answer, extras: Reply, seen: Reply) -> None:
    """The stored result of a replay, as it was reported; from the record of the run or from the global one."""
    source = {**seen, **extras}
    if source.get("value"):
        answer.value = canonical.load_json(source["value"])
    answer.operation_id = source.get("operation_id", "")
    answer.value_digest = source.get("value_digest", "")
    answer.result_truncated = source.get("truncated") == "1"


def _labels(labels: Mapping[str, str] | None) -> str:
    """Labels as `name=value` with both percent-escaped, so that they stay one field."""
    return " ".join(f"{quote(name)}={quote(value)}" for name, value in sorted((labels or {}).items()))


def _tools(tools: list[str] | None) -> str:
    for tool in tools or ():
        ids.check_name("tools", tool)
    return " ".join(quote(tool) for tool in tools or ())
