"""pytest plugin: collects `*.scenario.json`, and gives tests a `guard` of their own.

It needs `guardd` beside the client (`pip install "guardd-client[pytest]"`), which brings the server; without it the first use says so.
Nothing of guardd is imported until a scenario is collected or the fixture is used.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import subprocess

SUFFIX = ".scenario.json"
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
NEEDS = "scenarios and the `guard` fixture need guardd itself: pip install 'guardd-client[pytest]'"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--guardd-store`."""
    parser.getgroup("guardd").addoption(
        "--guardd-store",
        default="embedded:",
        metavar="URL",
        help="where scenarios and the guard fixture keep their state: embedded: (default, a real server), or fakeredis: "
        "(faster, proves less; needs guardd[fake])",
    )


# ---- Scenario files --------------------------------------------------------------------


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> ScenarioFile | None:
    """A file NAME.scenario.json is one test."""
    if file_path.name.endswith(SUFFIX):
        return ScenarioFile.from_parent(parent, path=file_path)
    return None


class ScenarioDiffers(Exception):
    """A scenario did not play as it says. args: the differences, a text each."""


class NotPlayed(Exception):
    """Scenarios cannot be played here. args: why, and what mends it."""


class ScenarioFile(pytest.File):
    """One scenario file."""

    def collect(self) -> Iterator[pytest.Item]:
        """Its one test."""
        yield ScenarioItem.from_parent(self, name=self.path.name.removesuffix(SUFFIX))


class ScenarioItem(pytest.Item):
    """Plays the file: each answer, what was executed, and for what reason the runs ended."""

    def runtest(self) -> None:
        """See pytest."""
        player = self.config.stash.get(PLAYER, None)
        if player is None:
            player = self.config.stash[PLAYER] = Player(self.config.getoption("--guardd-store"))
        if differences := player.play(self.path):
            raise ScenarioDiffers(*differences)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The differences, not a traceback of ours."""
        if isinstance(excinfo.value, ScenarioDiffers):
            return f"{self.path} does not play as it says:\n" + "\n".join(f"  {each}" for each in excinfo.value.args)
        if isinstance(excinfo.value, NotPlayed):
            return f"{self.path} was not played: {excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Where it stands."""
        return self.path, 0, f"scenario {self.name}"


class Player:
    """One store for all scenarios of a session. Raises: NotPlayed: guardd is not installed, or the store does not open."""

    def __init__(self, url: str) -> None:
        import asyncio
        import tempfile
        from contextlib import AsyncExitStack, ExitStack

        try:
            from guardd.model.errors import GuardError
            from guardd.store.connect import open_store
        except ImportError as error:
            raise NotPlayed(NEEDS) from error

        with ExitStack() as opening:
            folder = opening.enter_context(tempfile.TemporaryDirectory(prefix="guardd-pytest-"))
            self._runner = opening.enter_context(asyncio.Runner())
            self._stack = AsyncExitStack()

            async def open_it() -> Any:
                return await self._stack.enter_async_context(await open_store(url, state_dir=Path(folder) / "store"))

            try:
                self._opened = self._runner.run(open_it())
            except GuardError as error:
                raise NotPlayed(error.message) from error
            self._closing = opening.pop_all()

    def play(self, path: Path) -> list[str]:
        """What differs; each scenario has keys of its own."""
        import secrets

        from guardd.engine.core import Engine
        from guardd.model.errors import GuardError
        from guardd.replay.player import play
        from guardd.replay.scenario import read_scenario

        try:
            scenario = read_scenario(path)
        except GuardError as error:
            return [error.message]
        guard = Engine(self._opened.store, scenario.config(f"pytest-{secrets.token_hex(6)}"))
        return self._runner.run(play(scenario, guard)).differences

    def close(self) -> None:
        """Ends the server."""
        with self._closing:
            self._runner.run(self._stack.aclose())


PLAYER = pytest.StashKey[Player]()


def pytest_unconfigure(config: pytest.Config) -> None:
    """The store ends with the session."""
    if (player := config.stash.get(PLAYER, None)) is not None:
        player.close()


# ---- The fixture -----------------------------------------------------------------------


@pytest.fixture
def guard(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A `guardd_client.Guard` of a daemon and a store of this test's own, with `executions`, `reason` and `assert_run`."""
    import subprocess
    import tempfile
    from collections import Counter

    from guardd_client import Guard

    class GuardUnderTest(Guard):
        """A guard that can be asked what it let through."""

        def executions(self, run_id: str) -> dict[str, int]:
            """How often each tool was let through in a run and its sub-runs."""
            entries = self.call("trace", {"run": run_id, "limit": 10_000})
            calls = {
                (e["run"], e["call"]): e["tool"] for e in entries if e["op"] == "before" and e["action"] == "execute"
            }
            return dict(Counter(calls.values()))

        def reason(self, run_id: str) -> str:
            """Why a run ended; "" while it goes on."""
            return str(self.call("inspect", {"run": run_id})["reason"])

        def assert_run(
            self, run_id: str, *, executions: dict[str, int] | None = None, reason: str | None = None
        ) -> None:
            """Fails when other calls were let through, or the run ended for another reason."""
            if executions is not None:
                assert self.executions(run_id) == executions, f"executions in {run_id}"
            if reason is not None:
                assert self.reason(run_id) == reason, f"the end of {run_id}"

    with tempfile.TemporaryDirectory(prefix="gd-") as name:
        folder = Path(name)
        url, log = f"unix:{folder / 'd.sock'}", folder / "log"
        command = [
            sys.executable, "-m", "guardd.cli.main", "serve", "--listen", url, "--state-dir", str(folder / "state"),
            "--store", request.config.getoption("--guardd-store"),
        ]  # fmt: skip
        with log.open("wb") as to:
            process = subprocess.Popen(command, stderr=to, cwd=folder)  # noqa: S603 (our own command)
        try:
            _wait_until_it_serves(process, folder / "d.sock", log)
            with GuardUnderTest(url) as made:
                yield made
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_it_serves(process: subprocess.Popen[bytes], socket: Path, log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not socket.exists():
        if process.poll() is not None or time.monotonic() > deadline_s:
            said = log.read_text(encoding="utf-8", errors="replace")
            if "No module named" in said:
                pytest.fail(NEEDS, pytrace=False)
            last = said.strip().splitlines()[-1:] or ["nothing"]
            raise RuntimeError(f"guardd serve did not come up; it said: {last[0]!r}")
        time.sleep(0.02)
