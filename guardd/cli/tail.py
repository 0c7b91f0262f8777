"""`guardd tail [RUN]` follows what happens, a line an event; `guardd top` shows it live."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

from guardd_client import AsyncGuard, GuardRequestError, GuardUnavailable
from guardd_client.connection import default_url

from guardd.cli import show
from guardd.model.errors import BadArgument

LOOK_S = 0.5
READ_MAX = 1000


def add_commands(commands: Any) -> None:
    """Adds the commands to a parser."""
    top = commands.add_parser("top", help="runs live in a terminal; kill, freeze, resume, settle")
    top.add_argument("--url", default=None, help=f"of the daemon (default GUARDD_URL, else {default_url()})")
    top.set_defaults(handler=_top)
    text = "follow a run's trace; without RUN: stops, freezes and resumes of all runs"
    parser = commands.add_parser("tail", help=text, description=f"{text}. Ends with Ctrl-C.")
    parser.add_argument("run", metavar="RUN", nargs="?", default=None, help="path of a run; its sub-runs are shown too")
    parser.add_argument(
        "--lines", "-n", type=int, default=10, metavar="N", help="of RUN, begin with its last N entries (10)"
    )
    parser.add_argument("--reason", default=None, help="only this reason")
    parser.add_argument("--until-end", action="store_true", help="exit with 0 when RUN has ended")
    parser.add_argument("--url", default=None, help=f"of the daemon (default GUARDD_URL, else {default_url()})")
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    parser.set_defaults(handler=_tail)


async def _top(arguments: argparse.Namespace) -> int:
    try:
        from guardd.cli.top import Top
    except ImportError as error:
        raise BadArgument(
            "guardd top needs textual: pip install 'guardd[top]'", field="command", value="top"
        ) from error
    async with AsyncGuard(arguments.url, deadline_ms=2000) as guard:
        await guard.call("runs", {"limit": 1})
        await Top(guard).run_async()
    return 0


async def _tail(arguments: argparse.Namespace) -> int:
    if arguments.run is None:
        return await _events(arguments)
    return await _trace(arguments)


def _say(arguments: argparse.Namespace, entry: dict[str, Any], text: Callable[[Any], str]) -> None:
    if arguments.reason is None or entry.get("reason") == arguments.reason:
        print(json.dumps(entry, ensure_ascii=False) if arguments.json else show.harmless(text(entry)), flush=True)


class _Road:
    """Says once that the daemon is away, and once that it is back."""

    def __init__(self, url: str) -> None:
        self._url, self._is_open = url, True

    def closed(self, error: Exception) -> None:
        if self._is_open:
            print(f"guardd: {error}; trying again", file=sys.stderr, flush=True)
        self._is_open = False

    def opened(self) -> None:
        if not self._is_open:
            print(f"guardd: connected to {self._url} again", file=sys.stderr, flush=True)
        self._is_open = True


async def _trace(arguments: argparse.Namespace) -> int:
    """Entries as they come; the last one's id goes on from there, also after a break."""
    async with AsyncGuard(arguments.url, deadline_ms=2000) as guard:
        road, last, lines = _Road(guard.connection.url), None, arguments.lines
        while True:
            try:
                state = await guard.call("inspect", {"run": arguments.run}) if arguments.until_end else {}
                entries: list[dict[str, Any]] = []
                while True:
                    after: dict[str, str] = {"after": last} if last else {}
                    read = await guard.call("trace", {"run": arguments.run, "limit": READ_MAX, **after})
                    entries += read
                    last = read[-1]["id"] if read else last
                    if len(read) < READ_MAX:
                        break
                road.opened()
            except GuardUnavailable as error:
                road.closed(error)
                continue
            except GuardRequestError as error:
                if error.name != "unknown_run":
                    raise
                state, entries = {}, []
            for entry in entries if lines is None else entries[len(entries) - min(lines, len(entries)) :]:
                _say(arguments, entry, show.trace_line)
            lines = None
            if state.get("status") == "ended":
                return 0
            await asyncio.sleep(LOOK_S)


async def _events(arguments: argparse.Namespace) -> int:
    """Events as they are told; a look every half second notices a connection that broke and makes it anew."""
    heard = lambda event: _say(arguments, event, show.event)  # noqa: E731
    async with AsyncGuard(arguments.url, deadline_ms=2000, on_event=heard) as guard:
        road, is_watching = _Road(guard.connection.url), False
        while True:
            try:
                if not is_watching:
                    await guard.connection.watch("")
                    is_watching = True
                else:
                    await guard.call("runs", {"limit": 1})
                road.opened()
            except GuardUnavailable as error:
                road.closed(error)
                continue
            await asyncio.sleep(LOOK_S)
