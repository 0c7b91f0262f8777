"""A worker of the demo: a process with a client of its own. It takes one JSON request a line and answers one.

{"do": "call", "tool", "args", "key"?, "version"?}   guarded; the tool's effect is a line in a file
{"do": "pay", "order", "then": "report" | "hang"}      a refund: appended to the ledger of the outside world
{"do": "loop"}                                         calls a tool with new arguments until the run is over
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from guardd_client import Guard, Refused, Run


def main() -> None:
    """Serves requests from standard input."""
    role, payments = sys.argv[1], Path(sys.argv[2])
    with Guard() as guard:
        run = guard.run(agent=role)
        run.open()
        print(json.dumps({"ready": role}), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            handler = {"call": _call, "pay": _pay, "loop": _loop}[request["do"]]
            print(json.dumps(handler(run, request, payments)), flush=True)


def _call(run: Run, request: dict[str, Any], _: Path) -> dict[str, Any]:
    answer = run.before(request["tool"], request["args"])
    if answer.action == "execute":
        run.after(answer["call"], "progress", value={"ok": True}, progress_version=request.get("version"))
    return dict(answer)


def _pay(run: Run, request: dict[str, Any], payments: Path) -> dict[str, Any]:
    """The effect: one line in a file that the guard cannot touch."""
    order = request["order"]
    answer = run.before("refund", {"order": order, "cents": 4200}, idempotency_key=f"refund:{order}")
    if answer.action == "execute":
        with payments.open("a") as file:
            file.write(f"{order} 4200 by {os.getpid()}\n")
            file.flush()
            os.fsync(file.fileno())
        if request["then"] == "hang":
            print(json.dumps({"paid_and_hangs": os.getpid()}), flush=True)
            time.sleep(600)
        run.after(answer["call"], "progress", value={"refunded": order})
    return dict(answer)


def _loop(run: Run, _: dict[str, Any], __: Path) -> dict[str, Any]:
    @run.tool()
    def work(n: int) -> dict[str, int]:
        return {"n": n}

    print(json.dumps({"looping": run.agent}), flush=True)
    n = 0
    try:
        while not run.cancelled.wait(0.01):
            n += 1
            work(n)
    except Refused as refused:
        return {"stopped_after": n, "at_ns": time.time_ns(), "reason": refused.answer.reason}
    return {"stopped_after": n, "at_ns": time.time_ns(), "reason": "told"}


if __name__ == "__main__":
    main()
