"""What every operation of the engine needs: store, keys, rules, caches; and the way from a reply to an answer."""

from __future__ import annotations

import secrets
from typing import Any, NamedTuple

from guardd.engine.config import EngineConfig
from guardd.engine.link import Link
from guardd.engine.reading import Reader
from guardd.engine.shaping import Shaper, pairs, text
from guardd.engine.waiting import Wakeups
from guardd.keys import Key, Keys
from guardd.model.answers import Answer
from guardd.model.ids import root
from guardd.model.limits import Policy
from guardd.model.reasons import hint
from guardd.protocol.operations import RunParams
from guardd.scripts.bind import Invocation, packed

_CACHED_MAX = 65_536
_LISTED_MS = 60_000
_ASK_AGAIN = frozenset({"policy", "call", "global"})


class Reply(NamedTuple):
    """A script's reply. rest: the raw words of a reply that asks the engine to look again."""

    action: str
    reason: str
    extras: dict[str, str]
    rest: tuple[str, ...] = ()


class Context:
    """Shared by the operations; what it remembers are caches that may be lost at any time."""

    def __init__(self, link: Link, config: EngineConfig) -> None:
        self.link = link
        self.config = config
        self.keys = Keys(config.prefix)
        self.shaper = Shaper(config)
        self.reader = Reader(link, self.keys, config)
        self.rules_seen: set[str] = set()
        """Digests of rules that runs were made under and that differ from this engine's."""
        self.settings = packed(
            {
                "run_ttl_ms": config.run_ttl_ms,
                "ledger_ttl_ms": config.ledger_ttl_ms,
                "trace_max": config.trace_max,
                "calls_max": config.calls_max,
                "holders_max": config.holders_max,
            }
        )
        self.wakeups = Wakeups()
        self._rules = config.rules_digest()
        self._texts = {name: policy.text() for name, policy in config.policies.items()}
        self._policy_of: dict[str, str] = {}
        self._listed: dict[str, int] = {}

    # ---- Policies --------------------------------------------------------------

    def policy_name(self, run: str) -> str:
        """The policy of a run as last heard; the script says when it is another one."""
        return self._policy_of.get(run, self.config.default_policy)

    def policy(self, name: str) -> Policy:
        """A policy this engine does not know (another daemon's configuration) is judged by the default's members."""
        return self.config.policies.get(name) or self.config.policies[self.config.default_policy]

    def policy_text(self, name: str) -> str:
        """The limits of a policy as a run stores them."""
        return self._texts[self.policy(name).name]

    def learn_policy(self, run: str, name: str) -> None:
        """Remembers what the store said of a run's policy."""
        remember(self._policy_of, run, name)

    # ---- Requests --------------------------------------------------------------

    def birth(self, policy: str) -> str:
        """What a run is made with, should this request make one."""
        return f"policy={policy} epoch={secrets.token_hex(6)} rules={self._rules}"

    def for_run(self, request: RunParams) -> dict[str, Any]:
        """What every script takes that may make runs."""
        policy = self.policy_name(request.run)
        return {
            **self.for_known_run(request),
            "birth_record": self.birth(policy),
            "known_epoch": request.epoch or "",
            "limits": self.policy_text(policy),
        }

    def for_known_run(self, request: RunParams) -> dict[str, Any]:
        """What every script takes that works on a run which exists."""
        return {
            "trace_key": self.keys.trace(request.run),
            "run_keys": self.keys.chain(request.run),
            "now_ms": request.at_ms,
            "settings": self.settings,
            "channel": self.keys.events,
            "run": request.run,
        }

    async def ask(
        self,
        invocation: Invocation,
        request: RunParams,
        *,
        claims: Key | None = None,
    ) -> Reply:
        """Sends a script, and in the same round trip the plain commands that keep the indexes.

        claims: the ledger record this call may claim; it is listed before it can be claimed.
        """
        commands: list[Any] = []
        now_ms = request.at_ms if request.at_ms is not None else self.reader.now_ms()
        if claims is not None:
            lease_ms = int(self.policy(self.policy_name(request.run)).limits["claim_lease_ms"] or 0)
            commands.append(("ZADD", self.keys.doubt, "GT", now_ms + lease_ms, claims))
        if now_ms - self._listed.get(request.run, -_LISTED_MS) >= _LISTED_MS and invocation.script.makes_runs:
            remember(self._listed, request.run, now_ms)
            commands.append(("ZADD", self.keys.runs, now_ms, root(request.run), now_ms, request.run))
        return self.reply(await self.link.invoke(invocation, before=commands))

    def reply(self, raw: Any) -> Reply:
        """A script's reply, read."""
        action, reason = text(raw[0]), text(raw[1]) if len(raw) > 1 else ""
        if action in _ASK_AGAIN:
            return Reply(action, reason, {}, tuple(text(each) for each in raw[2:]))
        extras = pairs(raw[2:])
        if (rules := extras.get("rules")) and rules != self._rules:
            self.rules_seen.add(rules)
        return Reply(action, reason, extras)

    # ---- Answers ---------------------------------------------------------------

    async def answer(self, reply: Reply, run: str) -> Answer:
        """The answer a reply stands for; a stop comes with its envelope."""
        action, reason, extras, _ = reply
        answer = Answer(action=action, reason=reason, epoch=extras.get("epoch", ""), claim=extras.get("claim", ""))
        answer.evidence = {name: _evidence(name, extras[name]) for name in _EVIDENCE if name in extras}
        if "retry_after_ms" in extras:
            answer.retry_after_ms = int(extras["retry_after_ms"])
        if "lease_ms" in extras:
            answer.lease_ms = int(extras["lease_ms"])
        if "step" in extras:
            answer.step = int(extras["step"])
        if left := extras.get("remaining"):
            answer.remaining = {name: int(value) for name, value in (part.split("=") for part in left.split(" "))}
        if would := extras.get("would"):
            answer.would = [dict(zip(("action", "reason"), part.split(":"), strict=True)) for part in would.split(",")]
        if reason:
            answer.hint = hint(action, reason, answer.evidence, answer.retry_after_ms)
        if action == "stop":
            answer.envelope = await self.reader.envelope(run)
        return answer


_EVIDENCE = ("limit", "observed", "steps", "deny_rule", "ended_run")


def _evidence(name: str, value: str) -> Any:
    if name == "steps":
        return [int(step) for step in value.split(",")]
    return int(value) if name in ("limit", "observed") else value


def remember(cache: dict[str, Any], name: str, value: Any) -> None:
    """Puts an entry into a cache whose names come from clients."""
    if len(cache) >= _CACHED_MAX:
        cache.clear()
    cache[name] = value
