"""`guardd`: every command, and the exit codes they share.

exit codes

0  done          1  a check failed (a scenario differs, a call was refused)
2  bad usage     3  the store or the daemon is out of reach
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import uvloop
from guardd_client import GuardRequestError, GuardUnavailable

from guardd import __version__
from guardd.cli import control, demo, doctor, replay, serve, tail, tokens, wrap
from guardd.model.errors import BadArgument, GuardError, StoreRefused, StoreUnavailable

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_UNAVAILABLE = 0, 1, 2, 3


def build_parser() -> argparse.ArgumentParser:
    """The command line with all commands."""
    parser = argparse.ArgumentParser(
        prog="guardd", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve.add_commands(commands)
    control.add_commands(commands)
    tail.add_commands(commands)
    tokens.add_commands(commands)
    wrap.add_commands(commands)
    demo.add_command(commands)
    doctor.add_command(commands)
    replay.add_command(commands)
    version = commands.add_parser("version", help="print the version")
    version.add_argument("--json", action="store_true")
    version.set_defaults(handler=_version)
    return parser


async def _version(arguments: argparse.Namespace) -> int:
    print(json.dumps({"version": __version__}) if arguments.json else f"guardd {__version__}")
    return EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        code: int = uvloop.run(arguments.handler(arguments))
        return code
    except GuardError as error:
        shown = error.as_dict()
        if getattr(arguments, "json", False):
            print(json.dumps(shown), file=sys.stderr)
        else:
            details = "".join(f"\n  {name}: {shown[name]}" for name in ("field", "value", "limit") if name in shown)
            print(f"guardd: {error.name}: {error.message}{details}", file=sys.stderr)
        if isinstance(error, StoreUnavailable | StoreRefused):
            return EXIT_UNAVAILABLE
        return EXIT_USAGE if isinstance(error, BadArgument) else EXIT_FAILED
    except ValueError as error:  # of the client: a token's file that others can read, a certificate that is none
        print(f"guardd: {error}", file=sys.stderr)
        return EXIT_USAGE
    except GuardRequestError as error:
        control.print_request_error(error, as_json=getattr(arguments, "json", False))
        return EXIT_FAILED
    except GuardUnavailable as error:
        print(f"guardd: {error}", file=sys.stderr)
        if "store_unavailable" not in str(error):
            print("  start a daemon with: guardd serve   or name one with --url or GUARDD_URL", file=sys.stderr)
        return EXIT_UNAVAILABLE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
