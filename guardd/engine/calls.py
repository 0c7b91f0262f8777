"""before, after, renew, resolve: one tool call from the question to its result (SPEC 2.2, 2.3, 2.6)."""

from __future__ import annotations

import time
from typing import Any, NamedTuple
from urllib.parse import quote

from guardd import canonical
from guardd.engine.claims import Claims
from guardd.engine.context import Context, remember
from guardd.engine.deny_rules import DenyRules
from guardd.engine.shaping import Effect, amounts, text
from guardd.engine.sweep import Sweep
from guardd.engine.waiting import wait_for
from guardd.model import ids
from guardd.model.answers import Answer
from guardd.model.errors import BadArgument, ChangeRequired, NotAllowed, StoreUnavailable
from guardd.model.reasons import RETRY_CHANGES
from guardd.model.tools import ToolRule
from guardd.protocol import operations as ops
from guardd.scripts import stubs
from guardd.scripts.bind import Map, packed
from guardd.store.base import Unproved

_TURNS_MAX = 4


class Judged(NamedTuple):
    """A call as it is asked about: what does not change while it waits."""

    request: ops.Before
    tool: str
    rule: ToolRule
    normalised: Any
    effect: Effect | None
    client: str
    deny_rule: str


_CLIENT_BYTES_MAX = 128


class Calls:
    """Judges calls. When a script sees that a cache was wrong it writes nothing, says what is right, and is asked again."""

    def __init__(self, context: Context, deny_rules: DenyRules, sweep: Sweep) -> None:
        self.context = context
        self.deny_rules = deny_rules
        self.sweep = sweep
        self.claims = Claims(context)
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
        judged = Judged(request, tool, rule, normalised, effect, client, deny_rule)
        key = self.claims.key(request.run, effect)
        if not request.wait_ms or key is None:
            return await self._judge(judged)
        until_s = time.monotonic() + request.wait_ms / 1000
        while True:
            with self.context.wakeups.expect(key) as settled:
                left_s = until_s - time.monotonic()
                answer = await self._judge(judged, wait_ms=max(1, int(left_s * 1000)))
                if answer.reason != "in_flight" or left_s <= 0:
                    return answer
                # The end of the lease settles it as well: then it is in doubt.
                await wait_for(settled, min(left_s, ((answer.retry_after_ms or 0) + 1) / 1000))

    async def _judge(self, judged: Judged, *, wait_ms: int = 0) -> Answer:
        """Asks the script; a call id that was told to wait is judged again like a new one."""
        request, tool, rule, normalised, effect, client, deny_rule = judged
        policy_name = self.context.policy_name(request.run)
        run, own_op = request.run, effect is not None and effect.scope == "run"
        for _ in range(_TURNS_MAX):
            policy = self.context.policy(policy_name)
            shaped = self.context.shaper.call(tool, rule, policy, normalised)
            seen = await self.claims.look(effect, request.at_ms, wait_ms) if effect and effect.scope == "global" else {}
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
                limits=self.context.policy_text(policy_name),
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
                effect=_effect_map(effect, seen, wait_ms),
                rule=self.context.shaper.rule_map(tool, rule, policy),
                retry=request.retry.change if request.retry else "",
                version=request.progress_version,
                usage_map=amounts(request.usage),
                reserve=amounts(request.reserve),
                deny_rule=deny_rule,
            )
            try:
                action, reason, extras, _ = reply = await self.context.ask(
                    invocation, request, claims=self.claims.key(run, effect)
                )
            except Unproved as unproved:
                await self.claims.take_back(request, effect, unproved)
                raise
            if action == "policy":
                policy_name = reason
                self.context.learn_policy(run, reason)
                continue
            if action == "execute" and effect and effect.scope == "global":
                if not await self.claims.claim(
                    effect, request, tool, shaped.fingerprint, policy,
                    may_reclaim=rule.on_in_doubt == "reclaim", is_fresh="asked" not in extras,
                ):  # fmt: skip
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
                if action == "execute" and effect.scope == "global":
                    answer.lease_ms = int(policy.limits["claim_lease_ms"] or 0)
            return answer
        raise StoreUnavailable("the record of this call kept changing; send it again under the same call id")

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
                        channel=self.context.keys.events,
                    )
                )
                global_claim = text(report[0])
                continue
            self._call_of.pop(request.call, None)
            if digest:
                self.context.wakeups.wake(self.claims.key_of(request.run, digest, scope))
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
                channel=self.context.keys.events,
            ),
            request,
        )
        self.context.wakeups.wake(key)
        await self.sweep.settle(key)
        calls_key = self.context.keys.calls(request.run)
        await self.context.link.execute(
            ("HSET", calls_key, f"e:{effect.digest}", scope),
            ("PEXPIRE", calls_key, self.context.config.run_ttl_ms),
        )
        return await self.context.answer(reply, request.run)


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


def _effect_map(effect: Effect | None, seen: dict[str, str], wait_ms: int) -> Map:
    if effect is None:
        return Map("")
    record: dict[str, object] = {"scope": effect.scope, "digest": effect.digest, "wait_ms": wait_ms or None}
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
