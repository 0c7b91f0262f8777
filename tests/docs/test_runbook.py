"""docs/operations.md has a row for everything that an operator may meet: alerts, reasons, refusals, log events."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from guardd.model.reasons import NEXT_ACTION

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = re.split(r"^## ", (ROOT / "docs" / "operations.md").read_text(encoding="utf-8"), flags=re.MULTILINE)


def cells(title: str) -> set[str]:
    """What the first column of a section's table names."""
    (section,) = [each for each in SECTIONS if each.startswith(title)]
    rows = re.findall(r"^\| (`.+?) \|", section, flags=re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def calls(name: str, files: str = "**/*.py") -> Iterator[ast.Call]:
    """Every call of a function or method of this name in the package."""
    for path in sorted((ROOT / "guardd").glob(files)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == name:
                yield node


def words(node: ast.expr) -> str:
    """The constant part of a string."""
    return "".join(
        each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)
    )


def test_every_alert_has_a_row() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text(encoding="utf-8"))
    assert cells("Alerts") == {rule["alert"] for group in rules["groups"] for rule in group["rules"]}


def test_every_reason_has_a_row() -> None:
    named = {reason for reasons in NEXT_ACTION for reason in reasons}
    assert cells("Why a run ended") == named | {"killed", "cancelled"}


def test_every_refusal_at_start_has_a_row() -> None:
    """Of a store, of an address, and of a daemon that nobody could be let into."""
    said = [words(node.args[0]) for node in calls("StoreRefused")]
    said += [words(node.args[0]) for node in calls("BadArgument", "server/listeners.py")]
    said += [
        text for node in calls("BadArgument", "server/access.py") if "auth = tokens" in (text := words(node.args[0]))
    ]
    assert len(said) > 10
    rows = cells("Start-up refusals")
    assert [text for text in said if not any(row in text for row in rows)] == []
    assert [row for row in rows if not any(row in text for text in said)] == []


def test_every_log_event_has_a_row() -> None:
    logged = {
        node.args[0].value
        for level in ("info", "warning", "error", "critical", "exception")
        for node in calls(level)
        if node.args and isinstance(node.args[0], ast.Constant) and re.fullmatch(r"[a-z_]+\.[a-z_]+", str(node.args[0].value))
    }  # fmt: skip
    assert len(logged) > 15
    assert logged - cells("Log events") == set()
    assert cells("Log events") - logged == set()


@pytest.mark.parametrize("name", ["Stop everything", "Upgrade and rollback", "Sizing"])
def test_the_runbook_has_its_chapters(name: str) -> None:
    assert any(section.startswith(name) for section in SECTIONS)
