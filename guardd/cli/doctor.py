"""`guardd doctor`: what the store promises, what it does not, and what to mend; `--confirm` after a look."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from guardd_client import AsyncGuard

from guardd.model.errors import StoreRefused
from guardd.scripts.loader import load
from guardd.server.settings import Settings, add_flags, load_settings
from guardd.store.connect import open_store
from guardd.store.doctor import Finding, examine, examine_machine

_MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}


def add_command(commands: Any) -> None:
    """Adds the command to a parser."""
    parser = commands.add_parser(
        "doctor",
        help="what the store promises and what to mend",
        description="Looks at the store that `guardd serve` would use with the same settings. Exit code 1: something "
        "has to be mended first. With --confirm it tells the daemon that you looked and the store may be trusted.",
    )
    add_flags(parser)
    parser.add_argument(
        "--confirm", action="store_true", help="the store was flushed, rolled back or failed over: grant again"
    )
    parser.add_argument("--note", default=None, help="why, for the audit")
    parser.add_argument("--url", default=None, help="of the daemon, for --confirm")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=run_doctor)


async def run_doctor(arguments: argparse.Namespace) -> int:
    """Examines, or confirms."""
    if arguments.confirm:
        async with AsyncGuard(arguments.url, deadline_ms=5000) as guard:
            answer = await guard.call("confirm", {"note": arguments.note} if arguments.note else {})
        print(json.dumps(answer) if arguments.json else "confirmed: every daemon grants again within a second")
        return 0
    settings = load_settings(vars(arguments))
    with tempfile.TemporaryDirectory(prefix="guardd-doctor-") as scratch:
        findings = await _examine(settings, Path(scratch))
    if arguments.json:
        print(json.dumps([{"name": f.name, "level": f.level, "text": f.text} for f in findings], ensure_ascii=False))
    else:
        print("\n".join(f"{_MARKS[finding.level]} {finding.name:<18} {finding.text}" for finding in findings))
    return 1 if any(finding.level == "fail" for finding in findings) else 0


async def _examine(settings: Settings, scratch: Path) -> list[Finding]:
    """The machine first: its findings stand, whatever becomes of the store."""
    state_dir = Path(settings.state_dir)
    is_embedded = settings.store.startswith("embedded:")
    findings = examine_machine(state_dir, is_embedded=is_embedded)
    store = settings.store
    memory: Path | None = state_dir / "canary.json"
    if is_embedded:
        folder = Path(store.removeprefix("embedded:") or state_dir / "store")
        socket = folder / "store.sock"
        if socket.exists():
            store = f"unix://{socket.absolute()}"  # a daemon serves it: look at the same server
        elif not folder.exists():
            findings.append(Finding("store", "ok", f"none is in {folder} yet: a throw-away one was looked at"))
            store, memory = f"embedded:{scratch / 'store'}", None
    try:
        opened = await open_store(
            store, state_dir=state_dir / "store", durability=settings.durability or ("fsync" if is_embedded else None),
            timeout_ms=settings.store_timeout_ms, prefix=settings.prefix, memory=memory if state_dir.exists() else None,
        )  # fmt: skip
    except StoreRefused as error:
        return [*findings, Finding(error.field or "store", "fail", error.message)]
    if is_embedded:
        opened.store.kind = "embedded"  # a daemon's own server, reached by its socket
    async with opened:
        return [*findings, *await examine(opened, prefix=settings.prefix, probe=load("look"))]
