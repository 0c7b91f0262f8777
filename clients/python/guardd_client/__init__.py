"""Ask guardd before each tool call, report after it.

    from guardd_client import Guard
    run = Guard().run("run_42", agent="planner")

    @run.tool(key=["order"])
    def refund(order, cents): ...

AsyncGuard has the same names for asyncio. This package holds no rule.
Names are imported when they are first used: pytest loads the plugin of this package in every run.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from guardd_client.aio import AsyncGuard, AsyncRun
    from guardd_client.answers import Answer
    from guardd_client.errors import (
        GuardClientError,
        GuardRequestError,
        GuardUnavailable,
        Refused,
        RunLost,
        RunStopped,
        ToolDenied,
        ToolMustWait,
    )
    from guardd_client.sync import Guard, Run

__version__ = "0.1.0"
__all__ = [
    "Answer", "AsyncGuard", "AsyncRun", "Guard", "GuardClientError", "GuardRequestError", "GuardUnavailable", "Refused", "Run",
    "RunLost", "RunStopped", "ToolDenied", "ToolMustWait",
]  # fmt: skip
_HOMES = {"AsyncGuard": "aio", "AsyncRun": "aio", "Answer": "answers", "Guard": "sync", "Run": "sync"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value
