"""The client for code without asyncio: Guard and Run, with the names of the async ones.

One thread of the process runs the connections; any thread may call. A forked
child starts a thread and a connection of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from guardd_client.aio import UNSET, AsyncGuard, AsyncRun, log
from guardd_client.answers import Answer
from guardd_client.errors import GuardUnavailable
from guardd_client.renewals import Renewals
from guardd_client.tools import Granted, Outcome, ToolOptions

T = TypeVar("T")


class _Loop:
    """An event loop in a thread of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.get()).result()

    def get(self) -> asyncio.AbstractEventLoop:
        """The loop of this process; a forked child gets a new one."""
        with self._lock:
            if self._loop is None or self._pid != os.getpid():
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=loop.run_forever, name="guardd-client", daemon=True)
                thread.start()
                atexit.register(_end, loop, thread)
                self._loop, self._pid = loop, os.getpid()
            return self._loop


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Ends the thread with the process, without tasks left behind."""

    async def cancel() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        loop.stop()

    if thread.is_alive():
        asyncio.run_coroutine_threadsafe(cancel(), loop)
        thread.join(timeout=5)


def _start_anew() -> None:
    """A forked child has the memory of the loop and not its thread."""
    _LOOP.__init__()  # type: ignore[misc]


_LOOP = _Loop()
os.register_at_fork(after_in_child=_start_anew)


class Guard:
    """See AsyncGuard."""

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        deadline_ms: int = 10_000,
        on_unavailable: str = "deny",
    ) -> None:
        self._async = AsyncGuard(url, token=token, deadline_ms=deadline_ms, on_unavailable=on_unavailable)

    @property
    def unguarded(self) -> int:
        """How often a read-only tool ran while the guard was out of reach."""
        return self._async.unguarded

    def call(self, method: str, params: dict[str, Any], *, deadline_ms: int | None = None) -> Any:
        """See AsyncGuard.call."""
        return _LOOP.run(self._async.call(method, params, deadline_ms=deadline_ms))

    def run(
        self, run_id: str | None = None, *, agent: str = "", policy: str | None = None, limits: Mapping[str, Any] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Run:  # fmt: skip
        """See AsyncGuard.run."""

        async def make() -> AsyncRun:
            return self._async.run(run_id, agent=agent, policy=policy, limits=limits, labels=labels)

        return Run(self, _LOOP.run(make()))

    def close(self) -> None:
        """Closes the connection."""
        _LOOP.run(self._async.close())

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Run:
    """See AsyncRun."""

    def __init__(self, guard: Guard, run: AsyncRun) -> None:
        self.guard = guard
        self._async = run
        self.cancelled = _Flag(run)

    @property
    def run_id(self) -> str:
        """The run's path."""
        return self._async.run_id

    @property
    def agent(self) -> str:
        """The label of who asks."""
        return self._async.agent

    @property
    def epoch(self) -> str:
        """The life of the run, as last heard."""
        return self._async.epoch

    def sub_run(self, name: str, *, agent: str = "", limits: Mapping[str, Any] | None = None) -> Run:
        """See AsyncRun.sub_run."""
        return self.guard.run(f"{self.run_id}/{name}", agent=agent or self.agent, limits=limits)

    def open(self, *, progress_version: int | None = None) -> Answer:
        """See AsyncRun.open."""
        return _LOOP.run(self._async.open(progress_version=progress_version))

    def before(self, tool: str, args: Any = None, **options: Any) -> Answer:
        """See AsyncRun.before."""
        return _LOOP.run(self._async.before(tool, args, **options))

    def after(self, call: str, status: str, *, value: Any = UNSET, **options: Any) -> Answer:
        """See AsyncRun.after."""
        return _LOOP.run(self._async.after(call, status, value=value, **options))

    def renew(self, call: str, *, lease_ms: int | None = None) -> Answer:
        """See AsyncRun.renew."""
        return _LOOP.run(self._async.renew(call, lease_ms=lease_ms))

    def charge(self, **options: Any) -> Answer:
        """See AsyncRun.charge."""
        return _LOOP.run(self._async.charge(**options))

    def settle(self, op_id: str, *, usage: Mapping[str, int] | None = None) -> Answer:
        """See AsyncRun.settle."""
        return _LOOP.run(self._async.settle(op_id, usage=usage))

    def handoff(self, to: str, **options: Any) -> Answer:
        """See AsyncRun.handoff."""
        return _LOOP.run(self._async.handoff(to, **options))

    def checkpoint(self, version: int, ref: str | None = None) -> Answer:
        """See AsyncRun.checkpoint."""
        return _LOOP.run(self._async.checkpoint(version, ref))

    def finish(self, reason: str = "complete") -> Answer:
        """See AsyncRun.finish."""
        return _LOOP.run(self._async.finish(reason))

    def inspect(self) -> dict[str, Any]:
        """See AsyncRun.inspect."""
        return _LOOP.run(self._async.inspect())

    def tool(
        self, name: str | None = None, *, key: Sequence[str] | Callable[..., str] | str | None = None, scope: str | None = None,
        read_only: bool = False, not_executed: Sequence[type[BaseException]] = (), refusals: str = "raise",
        progress: Callable[[Any], int | None] | None = None, verify: Callable[..., Any] | None = None, lease_ms: int | None = None,
        wait_ms: int = 0,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # fmt: skip
        """Guards a function or a generator; see AsyncRun.tool. Async functions are guarded by AsyncRun."""
        options = ToolOptions(
            name, key, scope, read_only, tuple(not_executed), refusals, progress, verify, lease_ms, wait_ms
        )
        return lambda function: self._wrap(function, options)

    def _wrap(self, function: Callable[..., Any], options: ToolOptions) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{function.__name__} is async: guard it with AsyncGuard().run(...).tool(...)")
        tool = options.name or function.__name__
        self._async._tools[tool] = None  # noqa: SLF001 (one client, two shells)

        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def stream(*args: Any, **kwargs: Any) -> Any:
                asked = self._ask(tool, function, options, args, kwargs)
                if isinstance(asked, Outcome):
                    yield from asked.value or ()
                    return
                items: list[Any] = []
                with _SyncRenewals(self._async, asked, options):
                    try:
                        for item in function(*args, **kwargs, **asked.extra):
                            items.append(item)
                            yield item
                    except BaseException as error:
                        _LOOP.run(self._async._failed(asked.call, error, options))  # noqa: SLF001
                        raise
                _LOOP.run(self._async._done(asked.call, items, options))  # noqa: SLF001

            return stream

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                asked = self._ask(tool, function, options, args, kwargs)
            except GuardUnavailable:
                if not (options.read_only and self.guard._async.on_unavailable == "allow_read_only"):  # noqa: SLF001
                    raise
                self.guard._async.unguarded += 1  # noqa: SLF001
                log.warning("the guard is out of reach: %s runs unguarded, it is read-only", tool)
                return function(*args, **kwargs)
            if isinstance(asked, Outcome):
                return asked.value
            with _SyncRenewals(self._async, asked, options):
                try:
                    value = function(*args, **kwargs, **asked.extra)
                except BaseException as error:
                    _LOOP.run(self._async._failed(asked.call, error, options))  # noqa: SLF001
                    raise
            _LOOP.run(self._async._done(asked.call, value, options))  # noqa: SLF001
            return value

        return guarded

    def _ask(self, tool: str, function: Callable[..., Any], options: ToolOptions, args: Any, kwargs: Any) -> Any:
        asked = _LOOP.run(self._async._ask(tool, function, options, args, kwargs))  # noqa: SLF001
        if isinstance(asked, Granted) and "cancelled" in asked.extra:
            asked.extra["cancelled"] = self.cancelled
        return asked


class _Flag:
    """Like threading.Event, set when the run has ended."""

    def __init__(self, run: AsyncRun) -> None:
        self._run = run

    def is_set(self) -> bool:
        """True once the run has ended."""
        return self._run.cancelled.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end of the run; False when the time is over first."""

        async def waiting() -> bool:
            try:
                await asyncio.wait_for(self._run.cancelled.wait(), timeout)
            except TimeoutError:
                return False
            return True

        return _LOOP.run(waiting())


class _SyncRenewals:
    def __init__(self, run: AsyncRun, granted: Granted, options: ToolOptions) -> None:
        self._renewals = Renewals(run, granted, options)

    def __enter__(self) -> None:
        _LOOP.run(self._renewals.__aenter__())

    def __exit__(self, *_: object) -> None:
        _LOOP.run(self._renewals.__aexit__())
