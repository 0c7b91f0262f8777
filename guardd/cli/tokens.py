"""`guardd token` and `guardd audit`: who may ask, and who did."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from guardd_client import AsyncGuard
from guardd_client.connection import default_url

from guardd.cli import show
from guardd.model.errors import BadArgument
from guardd.protocol.operations import ROLES
from guardd.server.audit import verify

_UNITS_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def add_commands(commands: Any) -> None:
    """Adds the commands to a parser."""
    token = commands.add_parser("token", help="make, list and revoke tokens")
    verbs = token.add_subparsers(dest="verb", required=True, metavar="VERB")
    new = verbs.add_parser("new", help="make a token; its text is shown once", description=(
        "Makes a token and prints its text, this once. Give it to a client in GUARDD_TOKEN, or in a file (0600) that "
        "GUARDD_TOKEN_FILE names."))  # fmt: skip
    new.add_argument("--role", required=True, choices=ROLES)
    new.add_argument("--name", default="", help="for lists and the audit")
    new.add_argument("--run-prefix", default=None, metavar="PREFIX", help="the only runs it may name, e.g. team-a.")
    new.add_argument("--expires-in", default=None, metavar="TIME", help="e.g. 30d, 12h, 90m (default: never)")
    _finish(new, _new)
    _finish(verbs.add_parser("list", help="all tokens, without their secrets"), _list)
    revoke = verbs.add_parser("revoke", help="take a token away; its connections end within a second")
    revoke.add_argument("id", metavar="ID")
    _finish(revoke, _revoke)
    audit = commands.add_parser("audit", help="who asked what of an operator's operations, newest first")
    audit.add_argument("--limit", type=int, default=50)
    audit.add_argument("--verify", default=None, metavar="FILE", help="check the chain of an audit.jsonl instead")
    _finish(audit, _audit)


def _finish(parser: argparse.ArgumentParser, handler: Any) -> None:
    parser.add_argument("--url", default=None, help=f"of the daemon (default GUARDD_URL, else {default_url()})")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=handler)


async def _ask(arguments: argparse.Namespace, method: str, **params: Any) -> Any:
    async with AsyncGuard(arguments.url, deadline_ms=5000) as guard:
        return await guard.call(method, {name: value for name, value in params.items() if value is not None})


async def _new(arguments: argparse.Namespace) -> int:
    made = await _ask(
        arguments, "token_new", role=arguments.role, name=arguments.name, run_prefix=arguments.run_prefix,
        expires_in_ms=_duration_ms(arguments.expires_in),
    )  # fmt: skip
    print(json.dumps(made) if arguments.json else made["token"])
    return 0


async def _list(arguments: argparse.Namespace) -> int:
    found = await _ask(arguments, "token_list")
    print(json.dumps(found) if arguments.json else show.tokens(found))
    return 0


async def _revoke(arguments: argparse.Namespace) -> int:
    done = await _ask(arguments, "token_revoke", id=arguments.id)
    print(json.dumps(done) if arguments.json else "revoked" if done["revoked"] else f"no token {arguments.id}")
    return 0 if done["revoked"] else 1


async def _audit(arguments: argparse.Namespace) -> int:
    if arguments.verify is None:
        found = await _ask(arguments, "audit", limit=arguments.limit)
        print(json.dumps(found, ensure_ascii=False) if arguments.json else show.audit(found))
        return 0
    try:
        verdict = verify(Path(arguments.verify))
    except OSError as error:
        raise BadArgument(
            f"the audit cannot be read: {error}", field="--verify", value=arguments.verify, limit="a file"
        ) from error
    if arguments.json:
        print(json.dumps({"lines": verdict.lines, "broken_line": verdict.line or None, "why": verdict.why}))
    else:
        print(f"line {verdict.line}: {verdict.why}" if verdict.line else f"{verdict.lines} lines, unbroken")
    return 1 if verdict.line else 0


def _duration_ms(text: str | None) -> int | None:
    if text is None:
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,8})([smhd])", text)
    if not found:
        raise BadArgument("a time is a number and a unit", field="--expires-in", value=text, limit="30d, 12h, 90m, 45s")
    return int(found[1]) * _UNITS_MS[found[2]]
