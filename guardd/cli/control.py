"""Commands for operators: what runs, why it stopped, stop this, settle that. Each asks the daemon."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from guardd_client import AsyncGuard, GuardRequestError
from guardd_client.connection import default_url

from guardd.cli import show
from guardd.model.errors import BadArgument
from guardd.model.reasons import FINISH_REASONS, FREEZE_SCOPES, RESUME_CHANGES

Handler = Callable[[AsyncGuard, argparse.Namespace], Awaitable[int]]


def add_commands(commands: Any) -> None:
    """Adds the commands to a parser."""

    def add(name: str, help_text: str, handler: Handler, *arguments: tuple[str, dict[str, Any]]) -> None:
        parser = commands.add_parser(name, help=help_text, description=help_text)
        for flag, options in arguments:
            parser.add_argument(flag, **options)
        parser.add_argument("--url", default=None, help=f"of the daemon (default GUARDD_URL, else {default_url()})")
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.set_defaults(handler=_asking(handler))

    run = ("run", {"metavar": "RUN", "help": "path of the run"})
    note = ("--note", {"default": None, "help": "why, for the trace"})
    add("runs", "recent runs, newest first", _runs, ("--waiting", {"action": "store_true", "help": "only those that wait"}),
        ("--status", {"default": None, "choices": ("running", "waiting", "frozen", "ended")}), ("--reason", {"default": None}),
        ("--label", {"default": None, "metavar": "NAME[=VALUE]"}), ("--run-prefix", {"default": None}),
        ("--limit", {"type": int, "default": 50}))  # fmt: skip
    add("inspect", "counters, what is left, window, in flight, envelope of a run", _inspect, run)
    add("trace", "what happened in a run and its sub-runs", _trace, run, ("--limit", {"type": int, "default": 1000}),
        ("--export", {"type": Path, "default": None, "metavar": "FILE", "help": "write the whole tree to a file that guardd replay plays"}))  # fmt: skip
    add("ledger", "effects that are claimed or in doubt", _ledger, ("--in-doubt", {"action": "store_true"}))
    add(
        "kill",
        "end a run and all its sub-runs now; it cannot be resumed",
        _kill,
        run,
        ("--reason", {"default": "killed"}),
        note,
    )
    add(
        "freeze",
        "hold a run",
        _freeze,
        run,
        ("--scope", {"default": "all", "help": "comma list of " + ", ".join(FREEZE_SCOPES)}),
        note,
    )
    add("resume", "let a run go on after a named change", _resume, run, ("--change", {"required": True, "choices": RESUME_CHANGES}),
        ("--limit", {"action": "append", "default": [], "metavar": "NAME=N", "help": "set a limit, e.g. max_steps=100"}), note)  # fmt: skip
    add(
        "finish",
        "end a run from outside",
        _finish,
        run,
        ("--reason", {"default": "complete", "choices": FINISH_REASONS}),
        note,
    )
    add("resolve", "say what is true of an effect in doubt, after looking at the outside system", _resolve, run,
        ("tool", {"metavar": "TOOL"}), ("key", {"metavar": "KEY"}), ("state", {"choices": ("committed", "not_executed")}),
        ("--scope", {"choices": ("run", "global"), "default": None}), ("--operation-id", {"default": None}),
        ("--value", {"default": None, "metavar": "JSON"}), note)  # fmt: skip
    add("deny", "list the emergency rules for all runs; set or remove one", _deny, ("id", {"metavar": "ID", "nargs": "?", "default": None}),
        ("tool", {"metavar": "TOOL", "nargs": "?", "default": None, "help": "name or glob"}),
        ("--run-prefix", {"default": None}), ("--for-s", {"type": int, "default": None, "metavar": "S", "help": "until so many seconds from now"}),
        ("--remove", {"action": "store_true"}), note)  # fmt: skip
    add("incident", "freeze a run, write all about it to a file, then kill it", _incident, run, ("--reason", {"default": "incident_stop"}),
        ("--out", {"default": None, "metavar": "FILE"}), note)  # fmt: skip
    add("forget", "erase the arguments and the trace of a run; the ledger keeps its digests", _forget, run)
    add(
        "call",
        "any operation with JSON parameters",
        _call,
        ("method", {"metavar": "METHOD"}),
        ("params", {"metavar": "JSON", "nargs": "?", "default": "{}"}),
    )


def _asking(handler: Handler) -> Callable[[argparse.Namespace], Awaitable[int]]:
    async def handle(arguments: argparse.Namespace) -> int:
        async with AsyncGuard(arguments.url, deadline_ms=5000) as guard:
            return await handler(guard, arguments)

    return handle


def _print(arguments: argparse.Namespace, value: Any, text: Callable[[Any], str]) -> None:
    print(json.dumps(value, ensure_ascii=False) if arguments.json else show.harmless(text(value)))


async def _ask(guard: AsyncGuard, arguments: argparse.Namespace, method: str, **params: Any) -> int:
    answer = await guard.call(method, {name: value for name, value in params.items() if value is not None})
    _print(arguments, answer, show.answer)
    return 0


async def _runs(guard: AsyncGuard, arguments: argparse.Namespace) -> int:
    wanted = {name: getattr(arguments, name) for name in ("status", "reason", "label", "run_prefix")}
    params = {name: value for name, value in wanted.items() if value is not None}
    found = await guard.call("runs", {"limit": arguments.limit, "waiting": arguments.waiting, **params})
    _print(arguments, found, show.runs)
    return 0


async def _inspect(guard: AsyncGuard, arguments: argparse.Namespace) -> int:
    _print(arguments, await guard.call("inspect", {"run": arguments.run}), show.state)
    return 0


async def _trace(guard: AsyncGuard, arguments: argparse.Namespace) -> int:
    if arguments.export is not None:
        document = await guard.call("export", {"run": arguments.run})
        _write_private(arguments.export, document)
        is_whole = (
            "" if document["is_whole"] else "; its oldest entries were dropped, so it cannot be played from its start"
        )
        print(f"wrote {arguments.export}: {len(document['entries'])} entries{is_whole}")
        return 0
    _print(arguments, await guard.call("trace", {"run": arguments.run, "limit": arguments.limit}), show.trace)
    return 0


async def _ledger(guard: AsyncGuard, arguments: argparse.Namespace) -> int:
    _print(arguments, await guard.call("ledger", {"in_doubt": arguments.in_doubt}), show.ledger)
    return 0


async def _kill(guard: AsyncGuard, arguments: argparse.Namespace) -> int:
    return await _ask(guard, arguments, "kill", run=arguments.run, reason=arguments.reason, note=arguments.note)


async def _freeze(guard: AsyncGuard, arguments: argparse.Namespace) -> int:
    return await _ask(guard, arguments, "freeze", run=arguments.run, scope=arguments.scope, note=arguments.note)


async def _resume(guard: AsyncGuard, arguments: argparse.Namespace) -> int:
    limits: dict[str, Any] = {}
    for each in arguments.limit:
        name, _, value = each.partition("=")
        if not (value.isdigit() or value == "unlimited"):
            raise BadArgument("a limit is NAME=N or NAME=unlimited", field="--limit", value=each, limit="NAME=N")
        limits[name] = int(value) if value.isdigit() else None
    return await _ask(
        guard,
        arguments,
        "resume",
        run=arguments.run,
        change=arguments.change,
        limits=limits or None,
        note=arguments.note,
    )


async def _finish(guard: AsyncGuard, arguments: argparse.Namespace) -> int:
    return await _ask(guard, arguments, "finish", run=arguments.run, reason=arguments.reason, note=arguments.note)


async def _resolve(guard: AsyncGuard, arguments: argparse.Namespace) -> int:
    value = {"value": _json(arguments.value, "--value")} if arguments.value is not None else {}
    return await _ask(
        guard, arguments, "resolve", run=arguments.run, tool=arguments.tool, idempotency_key=arguments.key, state=arguments.state,
        scope=arguments.scope, operation_id=arguments.operation_id, note=arguments.note, **value,
    )  # fmt: skip


async def _deny(guard: AsyncGuard, arguments: argparse.Namespace) -> int:
    if arguments.id is None:
        _print(arguments, await guard.call("deny_rules", {}), show.deny_rules)
        return 0
    until_ms = None if arguments.for_s is None else time.time_ns() // 1_000_000 + arguments.for_s * 1000
    return await _ask(
        guard, arguments, "deny_rule", id=arguments.id, tool=arguments.tool, run_prefix=arguments.run_prefix, until_ms=until_ms,
        remove=arguments.remove or None, note=arguments.note,
    )  # fmt: skip


def _write_private(path: Path, value: Any) -> None:
    """A file for its owner only: it holds arguments."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(json.dumps(value, ensure_ascii=False, indent=1) + "\n")


async def _incident(guard: AsyncGuard, arguments: argparse.Namespace) -> int:
    """Freeze first, so that nothing new starts while the bundle is written; the kill ends what is left."""
    frozen = await guard.call("freeze", {"run": arguments.run, "note": "incident"})
    bundle: dict[str, Any] = {"run": arguments.run, "frozen": frozen}
    for name, method, params in (
        ("state", "inspect", {"run": arguments.run}),
        ("trace", "export", {"run": arguments.run.split("/")[0]}),
        ("in_doubt", "ledger", {}),
    ):
        bundle[name] = await guard.call(method, params)
    bundle["in_doubt"] = [
        effect for effect in bundle["in_doubt"] if f"{effect['run']}/".startswith(f"{arguments.run.split('/')[0]}/")
    ]
    bundle["killed"] = await guard.call(
        "kill",
        {"run": arguments.run, "reason": arguments.reason} | ({"note": arguments.note} if arguments.note else {}),
    )
    path = Path(arguments.out or f"incident-{arguments.run.replace('/', '_')}.json")
    _write_private(path, bundle)
    _print(
        arguments,
        {"file": str(path), "reason": bundle["killed"]["reason"], "in_doubt": bundle["in_doubt"]},
        show.incident,
    )
    return 0


async def _forget(guard: AsyncGuard, arguments: argparse.Namespace) -> int:
    return await _ask(guard, arguments, "forget", run=arguments.run)


async def _call(guard: AsyncGuard, arguments: argparse.Namespace) -> int:
    params = _json(arguments.params, "JSON")
    if not isinstance(params, dict):
        raise BadArgument("parameters are an object", field="JSON", value=arguments.params, limit="object")
    print(json.dumps(await guard.call(arguments.method, params), ensure_ascii=False))
    return 0


def _json(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadArgument(f"this is no JSON: {error}", field=field, value=text, limit="JSON") from error


def print_request_error(error: GuardRequestError, *, as_json: bool) -> None:
    """An error that the daemon named, and what to do about it."""
    if as_json:
        print(json.dumps(error.error, ensure_ascii=False), file=sys.stderr)
        return
    print(f"guardd: {error}", file=sys.stderr)
    advice = {"unknown_run": "guardd runs   lists the runs there are", "limits_needed": "resume with --change limits_raised --limit NAME=N",
              "in_flight": "wait for the lease to end, or for its owner", "not_resumable": "start a new run"}.get(error.name)  # fmt: skip
    if advice:
        print(f"  {advice}", file=sys.stderr)
