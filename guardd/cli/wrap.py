"""`guardd run -- COMMAND` and `guardd init`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from guardd_client import AsyncGuard, GuardRequestError, GuardUnavailable
from guardd_client.connection import default_url

from guardd.cli import show
from guardd.model.errors import BadArgument, StoreUnavailable
from guardd.model.limits import LIMITS
from guardd.server.settings import Settings

_TAIL = """
# A policy: limits under a name; `base` gives what is not named.
# [policies.careful]
# base = "agent"
{limits}

# A tool rule, by exact name or glob; the longest glob wins.
# [tools."mail.*"]
# requires_key = true
# effect_scope = "global"
"""


def add_commands(commands: Any) -> None:
    """Adds the commands to a parser."""
    wrapper = commands.add_parser(
        "run", help="run a command under a guard: guardd run -- python agent.py",
        description="Starts a daemon of this folder if none answers, sets GUARDD_URL and GUARDD_RUN_ID, ends with the envelope.",
    )  # fmt: skip
    wrapper.add_argument("--run-id", default=None, help="default: a new one")
    wrapper.add_argument(
        "--label", action="append", default=[], metavar="NAME=VALUE", help="for `guardd runs --label`; may be repeated"
    )
    wrapper.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run")
    wrapper.set_defaults(handler=run)
    init = commands.add_parser("init", help="write a commented guardd.toml")
    init.set_defaults(handler=write_settings)


def _label(text: str) -> tuple[str, str]:
    name, is_named, value = text.partition("=")
    if not is_named:
        raise BadArgument("a label has a name and a value", field="--label", value=text, limit="NAME=VALUE")
    return name, value


async def run(arguments: argparse.Namespace) -> int:
    """Runs the command; its exit code is ours."""
    argv = arguments.argv[1:] if arguments.argv[:1] == ["--"] else arguments.argv
    if not argv:
        raise BadArgument("name a command: guardd run -- python agent.py", field="COMMAND", limit="a command")
    url, run_id = default_url(), arguments.run_id or f"run-{secrets.token_hex(4)}"
    if url.startswith("unix:"):
        url = f"unix:{Path(url.removeprefix('unix:').removeprefix('//')).absolute()}"
    async with _daemon(url), AsyncGuard(url) as guard:
        handle = guard.run(run_id, labels=dict(_label(each) for each in arguments.label))
        await handle.open()
        process = await asyncio.create_subprocess_exec(
            *argv, env={**os.environ, "GUARDD_URL": url, "GUARDD_RUN_ID": run_id}
        )
        ended = asyncio.create_task(handle.cancelled.wait())
        finished = asyncio.create_task(process.wait())
        await asyncio.wait((ended, finished), return_when=asyncio.FIRST_COMPLETED)
        code = await finished
        ended.cancel()
        print(show.state(await handle.inspect()), file=sys.stderr)
        return code


@contextlib.asynccontextmanager
async def _daemon(url: str) -> Any:
    """The daemon that answers at `url`, or one of our own for as long as this lasts."""
    try:
        async with AsyncGuard(url, deadline_ms=300) as guard:
            await guard.call("runs", {})
        yield
        return
    except (GuardUnavailable, GuardRequestError):
        pass
    state_dir = Path(".guardd")
    state_dir.mkdir(mode=0o700, exist_ok=True)
    with (state_dir / "daemon.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "guardd.cli.main", "serve", "--listen", url, stderr=log, start_new_session=True
        )
    try:
        async with AsyncGuard(url, deadline_ms=20_000) as guard:
            await guard.call("runs", {})
        if process.returncode is not None:
            raise StoreUnavailable("the daemon ended at once; see .guardd/daemon.log", field="daemon")
        yield
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


async def write_settings(_: argparse.Namespace) -> int:
    """Writes guardd.toml with every setting as a comment; never over one that is there."""
    path = Path("guardd.toml")
    if path.exists():
        raise BadArgument(
            "guardd.toml is here already; move it away first", field="config", value=str(path), limit="no file"
        )
    path.write_text(settings_text(), encoding="utf-8")
    print("wrote guardd.toml; check it with: guardd check-config")
    return 0


def settings_text() -> str:
    """Every setting with help, unit and default, commented out."""
    lines = ["# Settings of guardd. Flags and GUARDD_* variables win over this file.", ""]
    for each in fields(Settings):
        if not each.metadata["help"]:
            continue
        unit = f" [{each.metadata['unit']}]" if each.metadata["unit"] else ""
        lines += [f"# {each.metadata['help']}{unit}", f"# {each.name} = {_toml(getattr(Settings(), each.name))}", ""]
    limits = "\n".join(
        f"# {limit.name} = {_toml(limit.agent if limit.agent is not None else 'unlimited')}  # {limit.help}"
        for limit in LIMITS.values()
    )
    return "\n".join(lines) + _TAIL.format(limits=limits)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return '"' + str(value) + '"'
