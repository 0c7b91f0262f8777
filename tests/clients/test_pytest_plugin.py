"""The pytest plugin: scenario files are tests, a guard of one's own, and readable differences."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
SCENARIOS = Path(__file__).resolve().parents[1] / "scenarios"
LOOP = SCENARIOS / "203-reference-abab.json"


@pytest.fixture(autouse=True)
def alone(pytester: pytest.Pytester) -> None:
    """Other plugins of this environment are not of these tests."""
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider -p no:schemathesis -p no:playwright\n")


@pytest.mark.parametrize("store", ["embedded:", "fakeredis:"])
def test_scenario_files_are_tests(pytester: pytest.Pytester, store: str) -> None:
    """One that holds, one that does not; the difference is in the report, no traceback of ours."""
    shutil.copy(LOOP, pytester.path / "loop.scenario.json")
    wrong = json.loads(LOOP.read_text(encoding="utf-8"))
    wrong["expect"]["executions"] = {"a": 9}
    (pytester.path / "wrong.scenario.json").write_text(json.dumps(wrong), encoding="utf-8")
    (pytester.path / "other.json").write_text("{}", encoding="utf-8")
    result = pytester.runpytest_subprocess("--guardd-store", store, "-v")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*wrong.scenario.json does not play as it says:*", "*expected a=9*", "*actual *a=2*"])
    assert "Traceback" not in result.stdout.str()


def test_a_file_that_is_no_scenario_is_named(pytester: pytest.Pytester) -> None:
    (pytester.path / "bad.scenario.json").write_text("{", encoding="utf-8")
    result = pytester.runpytest_subprocess("--guardd-store", "fakeredis:")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*bad.scenario.json is no JSON file*"])


def test_a_guard_of_its_own_for_each_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("turn", [1, 2])
        def test_refund_runs_once(guard, turn):
            run = guard.run("ticket-1", agent="support", limits={"max_same_call": 1, "max_denied": 1})
            paid = []

            @run.tool(key=["order"])
            def refund(order):
                paid.append(order)
                return "ok"

            assert refund(order=17) == refund(order=17) == "ok"
            assert paid == [17]
            guard.assert_run("ticket-1", executions={"refund": 1}, reason="")

        def test_what_is_not_so_fails(guard):
            guard.run("r", agent="a").before("look", {"q": 1})
            guard.assert_run("r", executions={"look": 2})
        """
    )
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*executions in r*"])


def test_without_guardd_it_says_what_to_install(pytester: pytest.Pytester) -> None:
    shutil.copy(LOOP, pytester.path / "loop.scenario.json")
    pytester.makeconftest("import sys\nsys.modules['guardd.store.connect'] = None\n")
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*loop.scenario.json was not played: *pip install 'guardd-client[[]pytest]'*"])
    assert "pytest_plugin.py" not in result.stdout.str(), "no traceback of ours"


def test_a_store_that_does_not_open_is_named(pytester: pytest.Pytester) -> None:
    shutil.copy(LOOP, pytester.path / "loop.scenario.json")
    result = pytester.runpytest_subprocess("--guardd-store", "redis://127.0.0.1:1/")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*loop.scenario.json was not played: *127.0.0.1:1*"])
    assert "pytest_plugin.py" not in result.stdout.str(), "no traceback of ours"


def test_who_does_not_use_it_does_not_pay(pytester: pytest.Pytester) -> None:
    """Loading the plugin imports nothing of guardd, and of the client nothing but the plugin."""
    pytester.makepyfile(
        """
        import sys

        def test_it():
            ours = {name for name in sys.modules if name.split(".")[0] in ("guardd", "guardd_client", "msgpack")}
            assert ours == {"guardd_client", "guardd_client.pytest_plugin"}
        """
    )
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1)
