"""`guardd replay`: plays scenario files and says where a guard differs from them."""

from __future__ import annotations

import argparse
import json
import secrets
import tempfile
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from guardd_client import AsyncGuard

from guardd.engine.core import Engine
from guardd.model.errors import BadArgument
from guardd.model.limits import check_limits
from guardd.replay.daemon import DaemonGuard, ReplayDaemon
from guardd.replay.from_trace import read_trace, scenario_of
from guardd.replay.player import Played, Step, evidence_text, play
from guardd.replay.scenario import Scenario, read_scenario
from guardd.store.base import Store
from guardd.store.connect import OpenedStore, open_store


def add_command(commands: Any) -> None:
    """Adds the command to a parser."""
    parser = commands.add_parser(
        "replay",
        help="play scenario files and exported traces: old failures on fake tools",
        description="Plays scenario files, and traces of guardd trace RUN --export FILE, on a virtual clock. The last line counts; exit code 1 when one differs.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="scenario file, or a folder of them")
    parser.add_argument(
        "--store", default="embedded:", metavar="URL",
        help="embedded: (default; a server of its own in a temporary folder), fakeredis:, redis://, rediss://, unix://",
    )  # fmt: skip
    parser.add_argument(
        "--through-daemon", action="store_true", help="through a daemon of its own and the wire, not in this process"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="LIMIT=N",
        help="play under another limit, such as max_same_call=5",
    )
    parser.add_argument("--show", action="store_true", help="print each run step by step")
    parser.add_argument("--json", action="store_true", help="one JSON object a scenario")
    parser.set_defaults(handler=run)
    scenario = commands.add_parser("scenario", help="make scenario files").add_subparsers(required=True, metavar="HOW")
    parser = scenario.add_parser("from-trace", help="of an exported trace: fake tools, and the answers given then")
    parser.add_argument("file", type=Path, metavar="FILE", help="written by guardd trace RUN --export FILE")
    parser.add_argument(
        "-o", "--out", type=Path, default=None, metavar="FILE", help="NAME.scenario.json; else it is printed"
    )
    parser.add_argument("--title", default="", help="what went wrong, in a sentence")
    parser.set_defaults(handler=from_trace)


async def run(arguments: argparse.Namespace) -> int:
    """Plays the files; 0 when all hold, else 1."""
    changes = dict(map(_limit, arguments.set))
    check_limits(changes)
    scenarios = [read_scenario(path, changes) for path in _expand(arguments.files)]
    failing = 0
    is_shown = arguments.show and not arguments.json
    with tempfile.TemporaryDirectory(prefix="guardd-replay-") as folder:
        async with (
            await open_store(arguments.store, state_dir=Path(folder) / "store") as opened,
            AsyncExitStack() as stack,
        ):
            daemon = None
            if arguments.through_daemon:
                url = f"unix://{opened.embedded.socket}" if opened.embedded else arguments.store
                daemon = await stack.enter_async_context(ReplayDaemon(Path(folder), url))
            for scenario in scenarios:
                if is_shown:
                    print(f"\n{scenario.id}  {scenario.title}")
                played = await _play_one(scenario, opened, daemon, is_shown=is_shown)
                failing += bool(played.differences)
                _report(played, arguments)
    if not arguments.json:
        print(f"{len(scenarios)} scenarios, {failing} failing")
    return 1 if failing else 0


async def _play_one(scenario: Scenario, opened: OpenedStore, daemon: ReplayDaemon | None, *, is_shown: bool) -> Played:
    """Each scenario has keys of its own; they are removed afterwards, also from a shared server."""
    prefix = f"guardd-replay-{secrets.token_hex(6)}"
    on_step = partial(_show, usual=scenario.limits) if is_shown else None
    try:
        if daemon is None:
            return await play(scenario, Engine(opened.store, scenario.config(prefix)), on_step=on_step)
        await daemon.configure(scenario, prefix)
        async with AsyncGuard(daemon.url) as guard:
            return await play(scenario, DaemonGuard(guard.call), on_step=on_step)
    finally:
        await _forget(opened.store, prefix)


async def _forget(store: Store, prefix: str) -> None:
    if keys := await store.scan(f"{prefix}:*"):
        await store.execute(*(("UNLINK", key) for key in keys))


def _limit(text: str) -> tuple[str, Any]:
    """`max_steps=9`, `max_steps=unlimited`, `mode=observe`."""
    name, _, value = text.partition("=")
    if value == "unlimited":
        return name, None
    return name, int(value) if value.isdigit() else value


async def from_trace(arguments: argparse.Namespace) -> int:
    """Writes the scenario file of a trace."""
    document = read_trace(arguments.file)
    if document is None:
        raise BadArgument(
            "this is no exported trace", field="FILE", value=str(arguments.file), limit="guardd trace RUN --export FILE"
        )
    text = json.dumps(scenario_of(document, arguments.title), indent=2, ensure_ascii=False) + "\n"
    if arguments.out is None:
        print(text, end="")
    else:
        arguments.out.write_text(text, encoding="utf-8")
        print(f"wrote {arguments.out}: play it with guardd replay {arguments.out}")
    return 0


def _expand(paths: list[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not found or not found[0].is_file():
            raise BadArgument("no scenario file here", field="FILE", value=str(path))
        files += found
    return files


def _report(played: Played, arguments: argparse.Namespace) -> None:
    scenario = played.scenario
    if arguments.json:
        steps = [{"at_ms": s.at_ms, "op": s.op, "params": s.params, "answer": s.answer} for s in played.steps]
        record: dict[str, Any] = {
            "id": scenario.id,
            "title": scenario.title,
            "differences": played.differences,
        }
        print(json.dumps(record | ({"steps": steps} if arguments.show else {}), ensure_ascii=False))
    elif played.differences:
        print(f"{scenario.id}  {scenario.title}: differs")
        shown = played.differences[:1] if scenario.kind == "incident" else played.differences
        for difference in shown:
            print(f"  {difference}")
        if len(shown) < len(played.differences):
            print(f"  and {len(played.differences) - len(shown)} more after it; --show prints each step")
    elif scenario.kind == "incident":
        executed = ", ".join(f"{tool} {count} x" for tool, count in scenario.expect["executions"].items()) or "nothing"
        ended = ", ".join(f"{run} ended: {reason}" for run, reason in scenario.expect["terminal"].items())
        print(
            f"{scenario.id}  plays as it was: {len(played.steps)} operations; executed {executed}; {ended or 'not ended'}"
        )


def _show(step: Step, usual: dict[str, Any]) -> None:
    """One line of a run as a reader follows it: who asked what, what was answered, by which rule, on what evidence.

    usual: limits of the file, which a line need not repeat.
    """
    p = dict(step.params)
    if isinstance(limits := p.pop("limits", None), dict):
        unusual = {name: value for name, value in limits.items() if name not in usual or usual[name] != value}
        p |= {"limits": unusual} if unusual else {}
    match step.op:
        case "before":
            asked = f"{p.get('agent') or 'agent'} asks {p['tool']} {json.dumps(p.get('args', {}), ensure_ascii=False)}"
            asked += f" key={p['idempotency_key']}" if p.get("idempotency_key") else ""
        case "after":
            asked = f"{p['call']} reports {p['status']}"
            asked += f" version={p['progress_version']}" if "progress_version" in p else ""
        case "handoff":
            asked = f"{p['from']} hands over to {p['to']}"
        case op:
            named = " ".join(f"{n}={v}" for n, v in p.items() if n not in ("at_ms", "run", "op_id"))
            asked = f"{op} {named}".strip()
    answer = step.answer
    said = answer.get("error") or " ".join(filter(None, (answer.get("action"), answer.get("reason"))))
    if evidence := evidence_text(answer.get("reason", ""), answer.get("evidence") or {}):
        said += f"  {evidence}"
    mark = "!" if step.differs else " "
    print(f"{mark}{step.at_ms:>8} ms  {p.get('run', ''):<8} {asked:<64} -> {said}")
    if step.op == "before" and answer.get("action") in ("deny", "stop", "wait") and answer.get("hint"):
        print(f"{'':>21}{answer['hint']}")
