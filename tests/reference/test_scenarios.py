"""The reference obeys every rule that is written down as an example."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reference.player import load, play, scenario_files


@pytest.mark.parametrize("file", scenario_files(), ids=lambda file: file.stem)
def test_the_reference_plays_the_scenario(file: Path) -> None:
    """Every answer and the state at the end are as the file says."""
    assert play(load(file)) == []


def test_all_scenarios_are_found() -> None:
    """A wrong directory would make the test above pass with nothing to play."""
    assert len([file for file in scenario_files() if file.parent.name == "scenarios"]) >= 123
