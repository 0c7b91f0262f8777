"""`guardd serve` and `guardd check-config`."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
from typing import Any

import structlog

from guardd.server.daemon import serve
from guardd.server.hooks import parse_hooks
from guardd.server.listeners import check_addresses
from guardd.server.settings import Settings, add_flags, load_settings
from guardd.server.workers import Workers


def add_commands(commands: Any) -> None:
    """Adds the commands to a parser."""
    parser = commands.add_parser(
        "serve", help="run the daemon", description="Serves the guard until SIGTERM; SIGHUP reloads rules."
    )
    add_flags(parser)
    parser.add_argument(
        "--log-format", choices=("text", "json"), default=None, help="default: text on a terminal, else json"
    )
    parser.set_defaults(handler=run_serve)
    checker = commands.add_parser("check-config", help="test the settings and exit")
    add_flags(checker)
    checker.add_argument("--json", action="store_true")
    checker.set_defaults(handler=run_check)


async def run_serve(arguments: argparse.Namespace) -> int:
    """Runs the daemon."""
    configure_log(arguments.log_format or ("text" if sys.stderr.isatty() else "json"))
    given = vars(arguments)
    gc.freeze()  # what start-up made lives for ever; requests leave few cycles
    gc.set_threshold(50_000, 20, 50)
    settings = load_settings(given)
    if settings.workers > 1:
        await Workers(settings, sys.argv[sys.argv.index("serve") + 1 :]).serve()
    else:
        await serve(settings, reload=lambda: load_settings(given))
    return 0


async def run_check(arguments: argparse.Namespace) -> int:
    """Reads the settings as `serve` would."""
    settings: Settings = load_settings(vars(arguments))
    config = settings.engine_config(b"")
    check_addresses(settings)
    found = {
        "policies": sorted(config.policies),
        "tools": sorted(config.tools.by_name),
        "hooks": sorted(parse_hooks(settings.hooks)),
        "listen": settings.listen,
        "http_listen": settings.http_listen,
        "store": settings.store,
    }
    print(json.dumps(found) if arguments.json else "\n".join(f"{name}: {value}" for name, value in found.items()))
    return 0


def configure_log(style: str) -> None:
    """Events on standard error: `noun.verb_past` names, facts as keys."""
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if style == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
