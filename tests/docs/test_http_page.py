"""The commands of docs/http.md are run, and print what the page says; `*` stands for anything."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.servers import Server
from tests.web import web

PAGE = (Path(__file__).resolve().parents[2] / "docs/http.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```console\n\$ (?P<command>[^\n]+)\n```\n```text\n(?P<output>.*?)\n```", re.DOTALL)
EXAMPLES = [(found["command"], found["output"]) for found in BLOCK.finditer(PAGE)]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_the_page_prints_what_it_says(embedded: Server, prefix: str) -> None:
    assert len(EXAMPLES) == PAGE.count("```console") == 7
    async with web(embedded.url, prefix) as served:
        env = {**os.environ, "HTTP": served.base, "TOKEN": await served.token("operator")}
        for command, output in EXAMPLES:
            process = await asyncio.create_subprocess_shell(command, stdout=asyncio.subprocess.PIPE, env=env)
            said, _ = await process.communicate()
            pattern = ".*".join(re.escape(part) for part in output.split("*"))
            assert process.returncode == 0
            assert re.fullmatch(pattern, said.decode().strip(), re.DOTALL), (command, said)
