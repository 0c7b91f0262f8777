"""The commands of docs/http.md and docs/incidents.md are run, and print what the page says; `*` stands for anything."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from guardd_client import AsyncGuard

from tests.servers import Server
from tests.web import web

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"```console\n\$ (?P<command>[^\n]+)\n```\n```text\n(?P<output>.*?)\n```", re.DOTALL)


async def check(name: str, count: int, env: Mapping[str, str], cwd: Path) -> None:
    """Runs the examples of a page in their order. count: how many there are."""
    examples = [
        (found["command"], found["output"]) for found in BLOCK.finditer((DOCS / name).read_text(encoding="utf-8"))
    ]
    assert len(examples) == count
    for command, output in examples:
        process = await asyncio.create_subprocess_shell(
            command, stdout=asyncio.subprocess.PIPE, env={**os.environ, **env}, cwd=cwd
        )
        said, _ = await process.communicate()
        pattern = ".*".join(re.escape(part) for part in output.split("*"))
        assert process.returncode == ("failing" in output and "0 failing" not in output), (command, said)
        assert re.fullmatch(pattern, said.decode().strip(), re.DOTALL), (command, said)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_http(embedded: Server, prefix: str, tmp_path: Path) -> None:
    async with web(embedded.url, prefix) as served:
        await check("http.md", 7, {"HTTP": served.base, "TOKEN": await served.token("operator")}, tmp_path)


async def test_incidents(embedded: Server, prefix: str, tmp_path: Path) -> None:
    """Of a run that went in circles."""
    async with web(embedded.url, prefix) as served, AsyncGuard(served.daemon.url) as guard:
        run = guard.run("ticket-9", limits={"max_denied": 1})
        for number in range(8):
            answer = await run.before(("draft", "review")[number % 2], {"file": "plan.md"}, agent="ab"[number % 2])
            if answer.action == "stop":
                break
            await run.after(answer["call"], "progress", value=number)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        await check("incidents.md", 5, {"RUN": "ticket-9", "GUARDD_URL": served.daemon.url, "PATH": path}, tmp_path)
