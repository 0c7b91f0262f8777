"""Who may ask what: role, run prefix, audit; then the engine. It knows callers and nothing of connections."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from guardd.engine.core import Engine
from guardd.engine.tokens import hide_tokens
from guardd.model.answers import Answer
from guardd.model.errors import BadArgument, GuardError, NotAllowed
from guardd.model.ids import NAME_BYTES_MAX, check_name, check_run
from guardd.model.limits import LIMITS, first_looser
from guardd.model.tools import NO_RULE, ToolRule
from guardd.protocol.operations import OPERATIONS, ROLES, Operation, Role, RunParams
from guardd.redaction import redact_text
from guardd.server.audit import Audit, Entry, Outcome, entry_text
from guardd.server.metrics import Metrics

if TYPE_CHECKING:
    from guardd.server.tracing import Tracing  # an extra

_STOPPING = frozenset({"kill", "finish"})
_LOOKING = frozenset({"audit", "token_list"})
"""The operator's, and nothing is done: only refusals are written."""
_FOR_ALL_RUNS = frozenset({"deny_rule", "deny_rules", "token_new", "token_list", "token_revoke", "audit", "confirm"})
_NARROWED = frozenset({"runs", "ledger"})
_NOTED = {
    "kill": ("reason", "note"), "finish": ("reason", "note"), "freeze": ("scope", "note"), "resume": ("change", "note"),
    "resolve": ("tool", "state", "note"), "deny_rule": ("tool", "run_prefix", "note"), "token_new": ("role", "name", "run_prefix"),
    "open": ("policy",), "confirm": ("note",),
}  # fmt: skip


_PART_MAX = 200
_READING_MAX = 16
"""Reading operations at once: their replies are large, and what decides must not wait behind many of them."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who asks.

    name:       as the audit shows it: of a token, or of the way in.
    run_prefix: the only runs that may be named, as a plain prefix of the path; "": all.
    """

    name: str
    role: Role
    run_prefix: str = ""


class Gate:
    """The one way from a caller to the engine.

    Args: metrics: what counts the answers; None: nobody asks for counts.
    """

    def __init__(self, engine: Engine, audit: Audit, metrics: Metrics | None = None) -> None:
        self.metrics = metrics
        self.audit = audit
        self.engine = engine
        self._reading = asyncio.Semaphore(_READING_MAX)
        self._tracing: Tracing | None = None

    def take(self, engine: Engine) -> None:
        """Asks another engine from now on: rules were reloaded."""
        self.engine, self.audit.stream = engine, engine.audit_stream
        self.trace(self._tracing)

    def trace(self, tracing: Tracing | None) -> None:
        """Makes spans from now on."""
        self._tracing = tracing
        self.engine.context.link.around = tracing.script if tracing else None

    async def call(self, caller: Caller, method: str, params: dict[str, Any], *, parent: str = "") -> Any:
        """The answer of one operation. parent: the caller's span, as a W3C `traceparent`; "": it has none.

        Raises: NotAllowed: the role or the prefix does not reach this far. AuditUnavailable: what permits
        something cannot be written down. Whatever the engine raises.
        """
        if self._tracing is None:
            return await self._counted(caller, method, params)
        with self._tracing.operation(method, params, parent) as span:
            answer = await self._counted(caller, method, params)
            self._tracing.answered(span, method, answer)
            return answer

    async def _counted(self, caller: Caller, method: str, params: dict[str, Any]) -> Any:
        metrics, began_s = self.metrics, time.perf_counter()
        if metrics is None:
            return await self._call(caller, method, params)
        if method == "kill":
            metrics.kill_asked(params.get("run"), began_s)
        try:
            answer = await self._call(caller, method, params)
        except GuardError as error:
            metrics.failed(method, error.name)
            raise
        metrics.answered(method, params, answer, time.perf_counter() - began_s)
        return answer

    async def _call(self, caller: Caller, method: str, params: dict[str, Any]) -> Any:
        operation = OPERATIONS.get(method)
        if operation is None:
            return await self.engine.call(method, params, role=caller.role)
        params = await self._admitted(caller, operation, params)
        copies = self._copies(caller, operation, params)
        if not copies:
            try:
                if operation.role == "reader":
                    async with self._reading:
                        return await self.engine.call(method, params, role=caller.role)
                return await self.engine.call(method, params, role=caller.role)
            except NotAllowed as error:
                await self.audit.refused(self._entry(caller, method, params, "refused", error.message))
                raise
        try:
            await self.audit.write(self._entry(caller, method, params, "asked"), copies=copies)
        except GuardError as error:
            await self.audit.note(self._entry(caller, method, params, "refused", error.name))
            raise
        try:
            answer = await self.engine.call(method, params, role=caller.role)
        except NotAllowed as error:
            await self.audit.note(self._entry(caller, method, params, "refused", error.message))
            raise
        except Exception as error:
            name = error.name if isinstance(error, GuardError) else type(error).__name__
            await self.audit.note(self._entry(caller, method, params, "failed", name), copies=copies)
            raise
        await self.audit.note(self._entry(caller, method, params, "done", _what(answer)), copies=copies)
        return answer

    async def admit(self, caller: Caller, method: str, run: str, *, least: Role) -> None:
        """Checks what is no operation of the table: listening to a run.

        Raises: NotAllowed: written down.
        """
        try:
            _check_role(caller, method, least)
            _check_prefix(caller, run)
        except NotAllowed as error:
            await self.audit.refused(self._entry(caller, method, {"run": run}, "refused", error.message))
            raise

    async def turned_away(self, name: str, method: str, why: str) -> None:
        """Writes down somebody whose token is none."""
        await self.audit.refused(self._entry(Caller(name, "reader"), method, {}, "refused", why) | {"role": ""})

    async def _admitted(self, caller: Caller, operation: Operation, params: dict[str, Any]) -> dict[str, Any]:
        try:
            least = operation.role
            if operation.name == "resolve" and self._rule(params).verify:
                least = "worker"
            _check_role(caller, operation.name, least)
            if not caller.run_prefix:
                return params
            if operation.name in _FOR_ALL_RUNS:
                raise NotAllowed(
                    f"{operation.name} is for all runs, and this caller is bound to a prefix: use a token without one",
                    field="run_prefix", value=caller.run_prefix, limit="a caller without a prefix",
                )  # fmt: skip
            if operation.name in _NARROWED:
                wanted = params.get("run_prefix") or caller.run_prefix
                _check_prefix(caller, wanted, field="run_prefix")
                return {**params, "run_prefix": wanted}
            if issubclass(operation.params, RunParams):
                _check_prefix(caller, params.get("run"))
            if params.get("scope") == "global" and self._rule(params).effect_scope != "global":
                raise NotAllowed(
                    "a global key reaches beyond the prefix of this caller: leave scope out, or say "
                    'effect_scope = "global" in the tool rule',
                    field="scope", value="global", limit="run",
                )  # fmt: skip
        except NotAllowed as error:
            await self.audit.refused(self._entry(caller, operation.name, params, "refused", error.message))
            raise
        return params

    def _rule(self, params: dict[str, Any]) -> ToolRule:
        tool = params.get("tool")
        if not isinstance(tool, str) or len(tool) > NAME_BYTES_MAX:
            return NO_RULE
        return self.engine.context.config.tools.find(tool)[1]

    def _copies(self, caller: Caller, operation: Operation, params: dict[str, Any]) -> int:
        """How many copies of the audit this needs before it is done; 0: it is not written down."""
        name = operation.name
        if name in _LOOKING:
            return 0
        if name == "open":
            return 2 if caller.role == "operator" and self._loosens(params) else 0
        if name == "finish":
            return 1 if caller.role == "operator" else 0
        if operation.role != "operator":
            return 0
        if name == "freeze":  # a narrower scope lets go what a wider one held
            return 1 if params.get("scope", "all") == "all" else 2
        if name == "deny_rule":  # a rule under the same id takes the older one away
            return 2 if params.get("remove") or self.engine.rules.has(params.get("id")) else 1
        return 1 if name in _STOPPING else 2

    def _loosens(self, params: dict[str, Any]) -> bool:
        limits, run = params.get("limits"), params.get("run")
        if not isinstance(limits, dict) or not isinstance(run, str) or not limits:
            return False
        context = self.engine.context
        name = params.get("policy")
        policy = context.policy(name if isinstance(name, str) else context.policy_name(run))
        # What a sub-run gets depends on its parent's limits, which the store knows.
        return "/" in run or first_looser(policy.limits, limits) is not None

    def _entry(self, caller: Caller, method: str, params: dict[str, Any], outcome: Outcome, why: str = "") -> Entry:
        key = self.engine.context.config.redact_key
        said = [value for name in _NOTED.get(method, ()) if isinstance(value := params.get(name), str)]
        if method == "deny_rule" and params.get("remove"):
            said.append("remove")
        if method in ("open", "resume") and isinstance(limits := params.get("limits"), dict):
            said.append(
                " ".join(f"{name}={limits[name]}" for name in LIMITS if isinstance(limits.get(name, ""), int | None))
            )
        if method == "resolve" and isinstance(text := params.get("idempotency_key"), str):
            said.append("key#" + hmac.digest(key, text.encode(), hashlib.sha256).hex()[:16])
        note = redact_text(" ".join(each[:_PART_MAX] for each in (*said, why) if each), key=key)
        return {
            "caller": entry_text(caller.name), "role": caller.role, "method": entry_text(method)[:64],
            "subject": _subject(params), "outcome": outcome, "note": entry_text(note),
        }  # fmt: skip


def _check_role(caller: Caller, method: str, least: Role) -> None:
    if ROLES.index(caller.role) < ROLES.index(least):
        raise NotAllowed(
            f"{method} needs the role {least}: an operator makes such a token with: guardd token new --role {least}",
            field="role", value=caller.role, limit=least,
        )  # fmt: skip


def _check_prefix(caller: Caller, run: object, *, field: str = "run") -> None:
    if caller.run_prefix and not (isinstance(run, str) and run.startswith(caller.run_prefix)):
        raise NotAllowed(
            "this caller may only name runs under its prefix: name such a run, or ask an operator for another "
            "token: guardd token new --run-prefix PREFIX",
            field=field, value=run if isinstance(run, str) else None, limit=f"{caller.run_prefix}...",
        )  # fmt: skip


def _subject(params: dict[str, Any]) -> str:
    """The run or the id that is meant, when it is well formed."""
    try:
        if "run" in params:
            return hide_tokens(check_run(params["run"]))
        return hide_tokens(check_name("id", params["id"]))[:64] if isinstance(params.get("id"), str) else ""
    except BadArgument:
        return "(malformed)"


def _what(answer: Any) -> str:
    if isinstance(answer, Answer):
        return f"{answer.action} {answer.reason}".strip()
    return f"id {answer['id']}" if isinstance(answer, dict) and "id" in answer else ""
