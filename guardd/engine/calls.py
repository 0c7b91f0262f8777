"""before, after, renew, resolve: one tool call from the question to its result (SPEC 2.2, 2.3, 2.6)."""

from __future__ import annotations

from urllib.parse import quote

from guardd import canonical
from guardd.engine.context import Context, remember
from guardd.engine.deny_rules import DenyRules
from guardd.engine.shaping import Effect, amounts, pairs, text
from guardd.keys import Key
from guardd.model import ids
from guardd.model.answers import Answer
from guardd.model.errors import BadArgument, ChangeRequired, NotAllowed, StoreUnavailable
from guardd.model.limits import Policy
from guardd.model.reasons import RETRY_CHANGES
from guardd.protocol import operations as ops
from guardd.scripts import stubs
from guardd.scripts.stubs import Map, packed

_TURNS_MAX = 4
_CLIENT_BYTES_MAX = 128


class Calls:
    """Judges calls. When a script sees that a cache was wrong it writes nothing, says what is right, and is asked again."""

    def __init__(self, context: Context, deny_rules: DenyRules) -> None:
        self.context = context
        self.deny_rules = deny_rules
        self._call_of: dict[str, tuple[str, str, str]] = {}

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
        tool, rule = self.context.config.tools.find(request.tool)
        normalised = canonical.normalise(request.args)
        effect = self.context.shaper.effect(request, tool, rule, normalised, ids.root(request.run))
        deny_rule = self.deny_rules.match(tool, request.run, request.at_ms)
        policy_name = self.context.policy_name(request.run)
        run, own_op = request.run, effect is not None and effect.scope == "run"
        for _ in range(_TURNS_MAX):
            policy = self.context.policy(policy_name)
            shaped = self.context.shaper.call(tool, rule, policy, normalised)
            seen = await self._look(effect, request.at_ms) if effect and effect.scope == "global" else {}
            invocation = stubs.before(
                calls_key=self.context.keys.calls(run),
                trace_key=self.context.keys.trace(run),
                marks_key=self.context.keys.marks(run),
                op_key=self.context.keys.op(run, effect.digest) if effect and own_op else self.context.keys.no_op(run),
                run_keys=self.context.keys.chain(run),
                now_ms=request.at_ms,
                settings=self.context.settings,
                channel=self.context.keys.events,
                birth_record=self.context.birth(policy_name),
                policy=policy_name,
                known_epoch=request.epoch or "",
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
                rule=self.context.shaper.rule_map(tool, rule, policy),
                retry=request.retry.change if request.retry else "",
                version=request.progress_version,
                usage_map=amounts(request.usage),
                reserve=amounts(request.reserve),
                deny_rule=deny_rule,
            )
            action, reason, extras, _ = reply = await self.context.ask(
                invocation, request, claims=self._key(run, effect)
            )
            if action == "policy":
                policy_name = reason
                self.context.learn_policy(run, reason)
                continue
            if action == "execute" and effect and effect.scope == "global":
                if not await self._claim(
                    effect, request, tool, rule.on_in_doubt == "reclaim", shaped.fingerprint, policy
                ):
                    continue
            if action == "execute":
                remember(
                    self._call_of,
                    request.call,
                    (tool, effect.digest if effect else "", effect.scope if effect else ""),
                )
            answer = await self.context.answer(reply, run)
            if action == "replay":
                _add_result(answer, extras, seen)
            if effect:
                answer.provider_key = effect.provider_key
            return answer
        raise StoreUnavailable("the record of this call kept changing; send it again under the same call id")

    async def _look(self, effect: Effect, at_ms: int | None) -> dict[str, str]:
        """What a global record says now (SPEC 2.6, first of three scripts)."""
        reply = await self.context.link.invoke(
            stubs.look(op_key=self.context.keys.global_op(effect.digest), now_ms=at_ms)
        )
        return {"state": text(reply[0]), **pairs(reply[2:])}

    async def _claim(
        self,
        effect: Effect,
        request: ops.Before,
        tool: str,
        may_reclaim: bool,
        fingerprint: str,
        policy: Policy,
    ) -> bool:
        """Claims a global key for an admitted call; on a loss the admission is withdrawn (SPEC 2.6)."""
        key = self.context.keys.global_op(effect.digest)
        reply = await self.context.link.invoke(
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
        await self.context.link.invoke(
            stubs.withdraw(
                calls_key=self.context.keys.calls(request.run),
                trace_key=self.context.keys.trace(request.run),
                marks_key=self.context.keys.marks(request.run),
                run_keys=self.context.keys.chain(request.run),
                now_ms=request.at_ms,
                settings=self.context.settings,
                channel=self.context.keys.events,
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
            _, rule = self.context.config.tools.find(tool)
            verdict = self.context.shaper.verdict(request.status, request.value, rule)
            value, value_map = self.context.shaper.result(request.value)
            reply = await self.context.ask(
                stubs.after(
                    calls_key=self.context.keys.calls(request.run),
                    trace_key=self.context.keys.trace(request.run),
                    marks_key=self.context.keys.marks(request.run),
                    op_key=self.context.keys.op(request.run, digest)
                    if scope == "run"
                    else self.context.keys.no_op(request.run),
                    run_keys=self.context.keys.chain(request.run),
                    now_ms=request.at_ms,
                    settings=self.context.settings,
                    channel=self.context.keys.events,
                    run=request.run,
                    call=request.call,
                    tool=tool,
                    op_digest=digest,
                    status=request.status,
                    verdict=verdict,
                    committed={None: "", True: "1", False: "0"}[request.side_effect_committed],
                    version=request.progress_version,
                    retry_ms=request.retry_after_ms,
                    reading=self.context.shaper.reading(request.status, verdict, request.value, rule),
                    is_exempt="1"
                    if self.context.shaper.is_round_exempt(
                        rule, self.context.policy(self.context.policy_name(request.run))
                    )
                    else "",
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
                report = await self.context.link.invoke(
                    stubs.report(
                        op_key=self.context.keys.global_op(digest),
                        now_ms=request.at_ms,
                        settings=self.context.settings,
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
            return await self.context.answer(reply, request.run)
        raise StoreUnavailable("the record of this call kept changing; send the result again")

    async def renew(self, request: ops.Renew) -> Answer:
        """The tool still runs: keep its claim and hear whether to stop (SPEC 2.6)."""
        ids.check_call_id(request.call)
        _, digest, scope = self._call_of.get(request.call, ("", "", ""))
        lease_ms = request.lease_ms or int(
            self.context.policy(self.context.policy_name(request.run)).limits["claim_lease_ms"] or 0
        )
        global_claim = ""
        for _ in range(_TURNS_MAX):
            reply = await self.context.ask(
                stubs.renew(
                    calls_key=self.context.keys.calls(request.run),
                    op_key=self.context.keys.op(request.run, digest)
                    if scope == "run"
                    else self.context.keys.no_op(request.run),
                    run_keys=self.context.keys.chain(request.run),
                    now_ms=request.at_ms,
                    settings=self.context.settings,
                    channel=self.context.keys.events,
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
                extended = await self.context.link.invoke(
                    stubs.extend(
                        op_key=self.context.keys.global_op(digest),
                        now_ms=request.at_ms,
                        owner=request.call,
                        lease_ms=lease_ms,
                    )
                )
                global_claim = text(extended[0])
                continue
            return await self.context.answer(reply, request.run)
        raise StoreUnavailable("the record of this call kept changing; renew it again")

    async def resolve(self, request: ops.Resolve, *, role: str = "operator") -> Answer:
        """An operator, or a worker's check where the tool rule says `verify`, settles an effect in doubt (SPEC 2.6).

        Raises: InFlight, AlreadyCommitted, UnknownOperation, NotAllowed.
        """
        ids.check_name("tool", request.tool)
        tool, rule = self.context.config.tools.find(request.tool)
        if role != "operator" and not rule.verify:
            raise NotAllowed(
                f"resolving {tool} is the operator's; its tool rule does not say verify",
                field="tool",
                value=tool,
            )
        scope = "global" if "global" in (rule.effect_scope, request.scope) else "run"
        effect = self.context.shaper.record(ids.root(request.run), tool, request.idempotency_key, scope)
        value, value_map = self.context.shaper.result(request.value)
        key = (
            self.context.keys.global_op(effect.digest)
            if scope == "global"
            else self.context.keys.op(request.run, effect.digest)
        )
        reply = await self.context.ask(
            stubs.resolve(
                op_key=key,
                now_ms=request.at_ms,
                settings=self.context.settings,
                state=request.state,
                names=packed({"run": request.run, "tool": quote(tool, safe="/:.-_"), "scope": scope}),
                key=effect.key,
                value=value,
                value_map=value_map,
                operation_id=request.operation_id or "",
                note=request.note or "",
            ),
            request,
        )
        calls_key = self.context.keys.calls(request.run)
        await self.context.link.execute(
            ("ZREM", self.context.keys.doubt, key),
            ("HSET", calls_key, f"e:{effect.digest}", scope),
            ("PEXPIRE", calls_key, self.context.config.run_ttl_ms),
        )
        return await self.context.answer(reply, request.run)

    def _key(self, run: str, effect: Effect | None) -> Key | None:
        if effect is None:
            return None
        return (
            self.context.keys.global_op(effect.digest)
            if effect.scope == "global"
            else self.context.keys.op(run, effect.digest)
        )


def _client(client: str | None) -> str:
    if client is None:
        return "-"
    if not 0 < len(client.encode()) <= _CLIENT_BYTES_MAX:
        raise BadArgument(
            "a client instance has a name",
            field="client",
            value=client,
            limit=f"1..{_CLIENT_BYTES_MAX} bytes",
        )
    return quote(client)


def _effect_map(effect: Effect | None, seen: dict[str, str]) -> Map:
    if effect is None:
        return Map("")
    record: dict[str, object] = {"scope": effect.scope, "digest": effect.digest}
    for name in ("state", "until_ms", "fp"):
        record[name] = seen.get(name)
    if "owner" in seen:
        record["owner"] = seen["owner"]
    return packed(record)


def _add_result(answer: Answer, extras: dict[str, str], seen: dict[str, str]) -> None:
    """The stored result of a replay, as it was reported; from the record of the run or from the global one."""
    source = {**seen, **extras}
    if source.get("value"):
        answer.value = canonical.load_json(source["value"])
    answer.operation_id = source.get("operation_id", "")
    answer.value_digest = source.get("value_digest", "")
    answer.result_truncated = source.get("truncated") == "1"
