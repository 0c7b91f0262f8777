"""The rules by example: every scenario file, on fakeredis and on a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from guardd.engine.core import Engine
from guardd.replay.player import play
from guardd.replay.scenario import read_scenario
from guardd.store.connect import OpenedStore
from tests.conftest import assert_expiries

FILES = sorted(Path(__file__).parent.glob("**/*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
async def test_a_failure_report_is_stopped_at_the_right_call(path: Path, opened: OpenedStore, prefix: str) -> None:
    """Answers and end state are those of the file, and every key left has its expiry."""
    scenario = read_scenario(path)
    played = await play(scenario, Engine(opened.store, scenario.config(prefix)))
    assert not played.differences, "\n".join(played.differences)
    await assert_expiries(opened.store, prefix)


def test_the_files_that_came_with_the_contract_are_all_here() -> None:
    """A file that is lost would be a rule that is lost."""
    assert len([path for path in FILES if path.parent == Path(__file__).parent]) == 123


async def test_a_wrong_expectation_is_reported(opened: OpenedStore, prefix: str, tmp_path: Path) -> None:
    """The player can fail: for an answer, for executions, for a terminal reason and for the ledger."""
    source = json.loads((Path(__file__).parent / "045-send-timeout-then-retry.json").read_text())
    source["ops"][0]["expect"] = {"action": "deny"}
    source["expect"] = {"executions": {}, "terminal": {"r1": "killed"}, "ledger": {}}
    (tmp_path / "wrong.json").write_text(json.dumps(source))
    scenario = read_scenario(tmp_path / "wrong.json")
    played = await play(scenario, Engine(opened.store, scenario.config(prefix)))
    assert [difference.split()[0] for difference in played.differences] == [
        "operation",
        "executions",
        "terminal",
        "ledger",
    ]
