"""A process full of workers for the soak: `python -m tests.fault.long.soak_worker URL FOLDER SEED WORKERS RUN,RUN,...`.

It runs until it is killed, frozen and thawed, or told to end by SIGTERM. Where
the frontier is it reads from the oracle's file of effects, as every other one.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from pathlib import Path

from tests.fault.long.oracle import Crowd, Oracle

DEADLINE_MS, PACE = 5000, 6


async def main(url: str, folder: str, seed: str, workers: str, runs: str) -> None:
    """Works, and prints what it came to."""
    crowd = Crowd(Oracle(Path(folder)), runs.split(","), random.Random(seed), pace=PACE)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: setattr(crowd, "is_over", True))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(crowd.tell())
        for _ in range(int(workers)):
            tasks.create_task(crowd.work(url, deadline_ms=DEADLINE_MS))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
