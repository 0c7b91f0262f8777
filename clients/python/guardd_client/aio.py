"""The client for asyncio: AsyncGuard and AsyncRun. The sync client has the same names (guardd_client.sync)."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from guardd_client.access import default_token
from guardd_client.answers import Answer
from guardd_client.connection import Connection, default_url, traceparent
from guardd_client.errors import GuardUnavailable, RunStopped
from guardd_client.renewals import Renewals
from guardd_client.tools import Granted, Outcome, ToolOptions, bind_arguments, key_of

log = logging.getLogger("guardd_client")

UNSET: Any = object()


class AsyncGuard:
    """A connection to the daemon, shared by any number of runs.

    Args:
        url:            unix:PATH, tcp://HOST:PORT or tls://HOST:PORT; None: GUARDD_URL, else the daemon of this folder.
        token:          None: GUARDD_TOKEN, else the content of the file GUARDD_TOKEN_FILE.
        deadline_ms:    a request without an answer by then raises GuardUnavailable.
        on_unavailable: "deny" (default), or "allow_read_only": tools wrapped with read_only=True run unguarded
                        while the guard is out of reach; logged and counted in `unguarded`.
        on_event:       hears what is told of runs that are watched: event (ended | frozen | resumed), run, reason ...
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        deadline_ms: int = 10_000,
        on_unavailable: str = "deny",
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        if on_unavailable not in ("deny", "allow_read_only"):
            raise ValueError(f"on_unavailable is deny or allow_read_only, not {on_unavailable!r}")
        self.on_unavailable = on_unavailable
        self.unguarded = 0
        self.deadline_ms = deadline_ms
        self.on_event = on_event
        self._runs: list[AsyncRun] = []
        self._arguments = (url or default_url(), token or default_token(), deadline_ms)
        self._connection = self._connect()
        self._pid = os.getpid()

    def _connect(self) -> Connection:
        url, token, deadline_ms = self._arguments
        return Connection(url, token=token, deadline_ms=deadline_ms, on_event=self._on_event)

    @property
    def connection(self) -> Connection:
        """The connection of this process: a forked child gets one, and a client name, of its own."""
        if self._pid != os.getpid():
            self._connection, self._pid = self._connect(), os.getpid()
        return self._connection

    async def call(self, method: str, params: dict[str, Any], *, deadline_ms: int | None = None) -> Any:
        """Any operation by name; the answer as Answer when it has an action, else plain values.

        Raises: GuardUnavailable, GuardRequestError.
        """
        if parent := traceparent():
            params = {**params, "traceparent": parent}
        result = await self.connection.call(method, params, deadline_ms=deadline_ms)
        return Answer(result) if isinstance(result, dict) and "action" in result else result

    def run(
        self, run_id: str | None = None, *, agent: str = "", policy: str | None = None, limits: Mapping[str, Any] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncRun:  # fmt: skip
        """A handle on one run. run_id None: GUARDD_RUN_ID, so that a child process goes on in its parent's run.

        Raises: ValueError: neither is given.
        """
        name = run_id or os.environ.get("GUARDD_RUN_ID")
        if not name:
            raise ValueError("name the run: guard.run(run_id), or set GUARDD_RUN_ID")
        made = AsyncRun(self, name, agent, policy, dict(limits) if limits is not None else None, dict(labels or {}))
        self._runs.append(made)
        return made

    def _on_event(self, event: dict[str, Any]) -> None:
        if self.on_event is not None:
            self.on_event(event)
        for run in self._runs:
            if event.get("event") == "ended" and (
                run.run_id == event["run"] or run.run_id.startswith(event["run"] + "/")
            ):
                run.cancelled.set()

    async def close(self) -> None:
        """Closes the connection."""
        await self.connection.close()

    async def __aenter__(self) -> AsyncGuard:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncRun:
    """One run, or a sub-run of it. It opens itself with the first call.

    cancelled: set when the run has ended: stop what is going on.
    """

    def __init__(
        self,
        guard: AsyncGuard,
        run_id: str,
        agent: str,
        policy: str | None,
        limits: dict[str, Any] | None,
        labels: dict[str, str],
    ) -> None:
        self.guard = guard
        self.run_id = run_id
        self.agent = agent
        self.cancelled = asyncio.Event()
        self.epoch = ""
        self._policy, self._limits, self._labels = policy, limits, labels
        self._tools: dict[str, None] = {}
        self._is_open = False
        self._opening = asyncio.Lock()

    def sub_run(self, name: str, *, agent: str = "", limits: Mapping[str, Any] | None = None) -> AsyncRun:
        """A child of this run: own window and version; steps and budgets count for this run too."""
        return self.guard.run(f"{self.run_id}/{name}", agent=agent or self.agent, limits=limits)

    async def open(self, *, progress_version: int | None = None) -> Answer:
        """Makes the run known, and listens for its end."""
        params = self._params(
            policy=self._policy, limits=self._limits, labels=self._labels or None, tools=list(self._tools) or None,
            progress_version=progress_version,
        )  # fmt: skip
        answer: Answer = self._heard(await self.guard.call("open", params))
        await self.guard.connection.watch(self.run_id)
        self._is_open = True
        return answer

    async def before(
        self, tool: str, args: Any = None, *, call: str | None = None, agent: str | None = None, idempotency_key: str | None = None,
        scope: str | None = None, retry: str | None = None, progress_version: int | None = None,
        usage: Mapping[str, int] | None = None, reserve: Mapping[str, int] | None = None, wait_ms: int | None = None,
        deadline_ms: int | None = None,
    ) -> Answer:  # fmt: skip
        """May this call run now? call: an id of at least 96 random bits; None makes one, it stands in `answer["call"]`.

        wait_ms: how long to wait for an owner of the effect who is at work, 0 to 60000; the deadline is that much later.

        Raises: GuardUnavailable: then the tool must not run. GuardRequestError.
        """
        await self._ensure_open()
        call = call or new_id()
        params = self._params(
            call=call, tool=tool, args=args, agent=self.agent if agent is None else agent, idempotency_key=idempotency_key,
            scope=scope, retry={"change": retry} if retry else None, progress_version=progress_version,
            usage=dict(usage) if usage else None, reserve=dict(reserve) if reserve else None,
            wait_ms=wait_ms,
        )  # fmt: skip
        if wait_ms:
            deadline_ms = (self.guard.deadline_ms if deadline_ms is None else deadline_ms) + wait_ms
        answer: Answer = self._heard(await self.guard.call("before", params, deadline_ms=deadline_ms))
        answer["call"] = call
        return answer

    async def after(
        self, call: str, status: str, *, value: Any = UNSET, progress_version: int | None = None,
        side_effect_committed: bool | None = None, operation_id: str | None = None, retry_after_ms: int | None = None,
        usage: Mapping[str, int] | None = None,
    ) -> Answer:  # fmt: skip
        """What became of an admitted call. Leave `value` out for functions that return nothing."""
        params = self._params(
            call=call, status=status, progress_version=progress_version, side_effect_committed=side_effect_committed,
            operation_id=operation_id, retry_after_ms=retry_after_ms, usage=dict(usage) if usage else None,
        )  # fmt: skip
        if value is not UNSET:
            params["value"] = value
        return self._heard(await self.guard.call("after", params))

    async def renew(self, call: str, *, lease_ms: int | None = None) -> Answer:
        """The tool still runs: keep its claim, hear whether to stop."""
        return self._heard(await self.guard.call("renew", self._params(call=call, lease_ms=lease_ms)))

    async def charge(
        self,
        *,
        op_id: str | None = None,
        usage: Mapping[str, int] | None = None,
        reserve: Mapping[str, int] | None = None,
    ) -> Answer:
        """Count or reserve the usage of a model call before it is made; settle by `answer["op_id"]`."""
        await self._ensure_open()
        op_id = op_id or new_id()
        params = self._params(
            op_id=op_id, usage=dict(usage) if usage else None, reserve=dict(reserve) if reserve else None
        )
        answer: Answer = self._heard(await self.guard.call("charge", params))
        answer["op_id"] = op_id
        return answer

    async def settle(self, op_id: str, *, usage: Mapping[str, int] | None = None) -> Answer:
        """What a charge really used."""
        return self._heard(
            await self.guard.call("settle", self._params(op_id=op_id, usage=dict(usage) if usage else None))
        )

    async def handoff(
        self, to: str, *, from_agent: str | None = None, state: Any = UNSET, op_id: str | None = None
    ) -> Answer:
        """Control goes to another agent; a circle without news is refused."""
        await self._ensure_open()
        params = self._params(op_id=op_id or new_id(), to=to) | {"from": from_agent or self.agent}
        if state is not UNSET:
            params["state"] = state
        return self._heard(await self.guard.call("handoff", params))

    async def checkpoint(self, version: int, ref: str | None = None) -> Answer:
        """The last safe point, for the envelope."""
        return self._heard(await self.guard.call("checkpoint", self._params(version=version, ref=ref)))

    async def finish(self, reason: str = "complete") -> Answer:
        """End the run; a framework's own max-turn error is `framework_cap`."""
        return self._heard(await self.guard.call("finish", self._params(reason=reason)))

    async def inspect(self) -> dict[str, Any]:
        """Counters, window, what is in flight."""
        return dict(await self.guard.call("inspect", {"run": self.run_id}))

    def tool(
        self, name: str | None = None, *, key: Sequence[str] | Callable[..., str] | str | None = None, scope: str | None = None,
        read_only: bool = False, not_executed: Sequence[type[BaseException]] = (), refusals: str = "raise",
        progress: Callable[[Any], int | None] | None = None, verify: Callable[..., Any] | None = None, lease_ms: int | None = None,
        wait_ms: int = 0,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # fmt: skip
        """Guards an async function: asked before, reported after, its claim renewed while it runs.

        Args:
            name:         of the tool; None: the function's.
            key:          names of arguments, a function of them, or a text that makes the idempotency key.
            scope:        "global": one effect whatever run asks.
            not_executed: exceptions that prove that nothing was sent; the key is then free again. Any other
                          exception leaves an effect in doubt.
            refusals:     "raise" ToolDenied, ToolMustWait or RunStopped; "return" the Answer instead.
            progress:     from the result to the progress version that it confirms, or None.
            verify:       asked when the effect is in doubt: True it happened, False it did not, None unknown.
                          The tool rule must say `verify = true`.
            lease_ms:     how long a claim lasts from each renewal on; None: as long as the run's limit says.
            wait_ms:      how long to wait for another owner of the effect who is at work, 0 to 60000.
        The function gets `provider_key` and `cancelled` when it has parameters of these names.
        """
        options = ToolOptions(
            name, key, scope, read_only, tuple(not_executed), refusals, progress, verify, lease_ms, wait_ms
        )
        return lambda function: self._wrap(function, options)

    def _wrap(self, function: Callable[..., Any], options: ToolOptions) -> Callable[..., Any]:
        tool = options.name or function.__name__
        self._tools[tool] = None

        if inspect.isasyncgenfunction(function):

            @functools.wraps(function)
            async def stream(*args: Any, **kwargs: Any) -> Any:
                asked = await self._ask(tool, function, options, args, kwargs)
                if isinstance(asked, Outcome):
                    for item in asked.value or ():
                        yield item
                    return
                items: list[Any] = []
                async with Renewals(self, asked, options):
                    try:
                        async for item in function(*args, **kwargs, **asked.extra):
                            items.append(item)
                            yield item
                    except BaseException as error:
                        await self._failed(asked.call, error, options)
                        raise
                await self._done(asked.call, items, options)

            return stream

        @functools.wraps(function)
        async def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                asked = await self._ask(tool, function, options, args, kwargs)
            except GuardUnavailable:
                if not (options.read_only and self.guard.on_unavailable == "allow_read_only"):
                    raise
                self.guard.unguarded += 1
                log.warning("the guard is out of reach: %s runs unguarded, it is read-only", tool)
                return await function(*args, **kwargs)
            if isinstance(asked, Outcome):
                return asked.value
            async with Renewals(self, asked, options):
                try:
                    value = await function(*args, **kwargs, **asked.extra)
                except BaseException as error:
                    await self._failed(asked.call, error, options)
                    raise
            await self._done(asked.call, value, options)
            return value

        return guarded

    async def _ask(
        self,
        tool: str,
        function: Callable[..., Any],
        options: ToolOptions,
        args: Any,
        kwargs: Any,
        *,
        has_verified: bool = False,
    ) -> Outcome | Granted:
        """Asks before. An Outcome is what the caller gets instead."""
        named, wanted = bind_arguments(function, args, kwargs)
        key = key_of(options.key, named)
        answer = await self.before(
            tool, named, idempotency_key=key, scope=options.scope, wait_ms=options.wait_ms or None
        )
        if answer.action == "execute":
            given = {"provider_key": answer.provider_key, "cancelled": self.cancelled}
            return Granted(answer["call"], answer.lease_ms, {name: given[name] for name in wanted})
        if answer.action == "replay":
            return Outcome(answer.value)
        if answer.reason == "in_doubt" and options.verify is not None and not has_verified and key is not None:
            happened = options.verify(*args, **kwargs)
            happened = await happened if inspect.isawaitable(happened) else happened
            if happened is not None:
                state = "committed" if happened else "not_executed"
                resolve = {"run": self.run_id, "tool": tool, "idempotency_key": key, "state": state, "note": "verify"}
                await self.guard.call("resolve", resolve | ({"scope": options.scope} if options.scope else {}))
                return await self._ask(tool, function, options, args, kwargs, has_verified=True)
        refusal = answer.refusal()
        if options.refusals == "return":
            return Outcome(answer)
        assert refusal is not None
        raise refusal

    async def _done(self, call: str, value: Any, options: ToolOptions) -> None:
        version = options.progress(value) if options.progress else None
        answer = await self.after(call, "progress", value=UNSET if value is None else value, progress_version=version)
        if answer.claim == "stale":
            log.warning("the effect of call %s was settled by others meanwhile; its result is kept beside", call)
        if answer.action == "stop":
            self.cancelled.set()

    async def _failed(self, call: str, error: BaseException, options: ToolOptions) -> None:
        """Nothing was sent: the key is free. Anything else, cancellation too: the outcome is unknown."""
        proves = isinstance(error, options.not_executed) if options.not_executed else False
        await asyncio.shield(self.after(call, "retryable", side_effect_committed=False if proves else None))

    def _params(self, **members: Any) -> dict[str, Any]:
        params = {"run": self.run_id} | {name: value for name, value in members.items() if value is not None}
        return params | ({"epoch": self.epoch} if self.epoch else {})

    def _heard(self, answer: Answer) -> Answer:
        if answer.action == "stop":
            self.cancelled.set()
        if answer.get("epoch"):
            self.epoch = str(answer["epoch"])
        return answer

    async def _ensure_open(self) -> None:
        async with self._opening:
            if not self._is_open:
                await self.open()


def new_id() -> str:
    """An id of 128 random bits."""
    return secrets.token_urlsafe(16)


__all__ = ["AsyncGuard", "AsyncRun", "RunStopped", "new_id"]
