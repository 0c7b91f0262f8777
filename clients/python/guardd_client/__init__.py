"""Ask guardd before each tool call, report after it.

    from guardd_client import Guard
    run = Guard().run("run_42", agent="planner")

    @run.tool(key=["order"])
    def refund(order, cents): ...

AsyncGuard has the same names for asyncio. This package holds no rule.
"""

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
