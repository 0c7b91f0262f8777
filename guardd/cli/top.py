"""`guardd top`: runs live in a terminal, one run's timeline, and the operator's hand on them. Needs `guardd[top]`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar

from guardd_client import AsyncGuard, GuardRequestError, GuardUnavailable
from rich.text import Text
from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Button, DataTable, Footer, Header, Input, Label, Select, Static

from guardd.cli import show
from guardd.cli.timeline import SIGNS, evidence_of, rows_of
from guardd.model.reasons import RESUME_CHANGES

EVERY_S = 1.0
TRACE_MAX = 500
BAR_WIDTH = 20
BARS = (
    ("steps", "steps", "max_steps"), ("rounds", "no_progress", "max_no_progress"), ("tokens", "tokens", "max_tokens"),
    ("model calls", "model_calls", "max_model_calls"), ("cost", "cost_micros", "max_cost_micros"),
    ("handoffs", "handoffs", "max_handoffs"),
)  # fmt: skip

Act = Callable[[dict[str, str]], Awaitable[Any]]
Fields = Mapping[str, tuple[str, tuple[str, ...] | None]]


def plain(text: Any) -> Text:
    """Text that is only text: no markup, no commands to the terminal."""
    return Text(show.harmless(str(text)))


class Ask(ModalScreen[bool]):
    """A question before something is changed: fields, a confirmation, the refusal in a sentence.

    Args: fields: name -> (label, choices or None). act: does it; what the daemon refuses is shown.
    """

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "cancel", "Cancel")]

    def __init__(self, title: str, fields: Fields, act: Act) -> None:
        super().__init__()
        self._title, self._fields, self._act = title, fields, act

    def compose(self) -> ComposeResult:
        """See textual."""
        with Vertical(id="ask"):
            yield Label(plain(self._title), id="ask-title")
            for name, (label, choices) in self._fields.items():
                yield Label(label)
                if choices:
                    yield Select([(each, each) for each in choices], id=name, allow_blank=False)
                else:
                    yield Input(id=name)
            yield Static("", id="ask-error")
            with Horizontal():
                yield Button("Do it", variant="error", id="yes")
                yield Button("Cancel", id="no")

    @on(Input.Submitted)
    @on(Button.Pressed, "#yes")
    async def do(self) -> None:
        """Asks the daemon."""
        values: dict[str, str] = {}
        for name, (_, choices) in self._fields.items():
            field = self.query_one(f"#{name}")
            assert isinstance(field, Select if choices else Input)
            values[name] = str(field.value)
        missing = next(
            (label for name, (label, _) in self._fields.items() if not values[name] and "(" not in label), None
        )
        if missing:
            self.query_one("#ask-error", Static).update(plain(f"{missing}: please say"))
            return
        try:
            await self._act({name: value for name, value in values.items() if value})
        except (GuardRequestError, GuardUnavailable, ValueError) as error:
            self.query_one("#ask-error", Static).update(plain(error))
            return
        self.dismiss(result=True)

    @on(Button.Pressed, "#no")
    def action_cancel(self) -> None:
        """Nothing is changed."""
        self.dismiss(result=False)


class View(Screen[None]):
    """A screen that looks again every second and at every event."""

    def on_mount(self) -> None:
        """See textual."""
        self.set_interval(EVERY_S, self.look)
        self.look()

    @work(exclusive=True)
    async def look(self) -> None:
        """Reads and shows; that the daemon is away is shown, too."""
        try:
            await self.refresh_state()
            self.app.sub_title = ""
        except (GuardUnavailable, GuardRequestError) as error:
            self.app.sub_title = show.harmless(str(error))

    def look_again(self, _: object = None) -> None:
        """Something was done, or told."""
        self.look()

    async def refresh_state(self) -> None:
        """What this screen reads."""
        raise NotImplementedError

    @property
    def guard(self) -> AsyncGuard:
        """The daemon."""
        assert isinstance(self.app, Top)
        return self.app.guard

    def fill(self, table: DataTable[Any], rows: dict[str, tuple[Any, ...]]) -> None:
        """New rows; the cursor stays on its key."""
        at = table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value if table.row_count else None
        table.clear()
        for key, cells in rows.items():
            table.add_row(*(cell if isinstance(cell, Text) else plain(cell) for cell in cells), key=key)
        if at in rows:
            table.move_cursor(row=list(rows).index(at))


class Runs(View):
    """All runs."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("slash", "filter", "Filter"), ("d", "app.push_screen('doubts')", "In doubt"), ("q", "app.quit", "Quit"),
    ]  # fmt: skip

    def compose(self) -> ComposeResult:
        """See textual."""
        yield Header()
        yield Static("", id="banner")
        yield Input(placeholder="text in run, state, reason or label", id="filter")
        yield DataTable(id="runs", cursor_type="row")
        yield Footer()

    def on_mount(self) -> None:
        """See textual."""
        table = self.query_one(DataTable)
        table.add_columns("run", "state", "reason", "steps", "refused", "tokens", "labels", "last")
        table.focus()
        super().on_mount()

    async def refresh_state(self) -> None:
        """See View."""
        runs = await self.guard.call("runs", {"limit": 200})
        doubts = await self.guard.call("ledger", {"in_doubt": True, "limit": 100})
        self.query_one("#banner", Static).update(plain(f"{len(doubts)} in doubt: press d" if doubts else ""))
        wanted = self.query_one("#filter", Input).value.lower()
        rows = {}
        for run in runs:
            labels = " ".join(f"{name}={value}" for name, value in run["labels"].items())
            cells = (run["run"], state_of(run), run["reason"], run["counters"]["steps"], run["counters"]["denied"],
                     run["counters"]["tokens"], labels, show.at(run["last_ms"]))  # fmt: skip
            if wanted in " ".join(map(str, cells)).lower():
                rows[run["run"]] = cells
        self.fill(self.query_one(DataTable), rows)

    def action_filter(self) -> None:
        """To the field."""
        self.query_one("#filter", Input).focus()

    @on(Input.Submitted, "#filter")
    @on(Input.Changed, "#filter")
    def filtered(self, event: Input.Submitted | Input.Changed) -> None:
        """Another text."""
        if isinstance(event, Input.Submitted):
            self.query_one(DataTable).focus()
        self.look()

    @on(DataTable.RowSelected)
    def opened(self, event: DataTable.RowSelected) -> None:
        """One run."""
        self.app.push_screen(Run(str(event.row_key.value)))


class Run(View):
    """One run: why it stopped, limits, sub-runs, timeline with the evidence marked."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("k", "kill", "Kill"), ("f", "freeze", "Freeze"), ("r", "resume", "Resume"), ("escape", "app.pop_screen", "Back"),
        ("q", "app.quit", "Quit"),
    ]  # fmt: skip

    def __init__(self, run: str) -> None:
        super().__init__()
        self.run = run

    def compose(self) -> ComposeResult:
        """See textual."""
        yield Header()
        with VerticalScroll(id="facts"):
            yield Static("", id="head")
        yield DataTable(id="timeline", cursor_type="row")
        yield Footer()

    def on_mount(self) -> None:
        """See textual."""
        table = self.query_one(DataTable)
        table.add_columns("", "time", "step", "agent", "call", "what", "result")
        table.focus()
        super().on_mount()

    async def refresh_state(self) -> None:
        """See View."""
        state = await self.guard.call("inspect", {"run": self.run})
        entries = await self.guard.call("trace", {"run": self.run, "limit": TRACE_MAX, "newest": True})
        below = sorted({entry["run"] for entry in entries} - {self.run})
        lines = [f"{self.run}  {state_of(state)} {state['reason']}".rstrip()]
        if state["limits"].get("mode") == "observe":
            lines.append("OBSERVE MODE: refusals are only recorded, every call runs")
        envelope = state.get("envelope") or {}
        if guard := envelope.get("guard"):
            lines.append("fired: " + " ".join(f"{name} {value}" for name, value in guard.items()))
        if envelope:
            lines.append(f"next: {envelope['next_action']}")
        lines += bars(state)
        if below:
            lines.append("sub-runs: " + ", ".join(each.removeprefix(f"{self.run}/") for each in below))
        lines += [f"effect {each['state']}: {each['tool']} {each['key']}" for each in state["operations"]]
        self.query_one("#head", Static).update(plain("\n".join(lines)))
        rows = rows_of(entries)
        refusal, evidence = evidence_of(rows)
        shown: dict[str, tuple[Any, ...]] = {}
        for row in rows:
            entry, after = row.entry, row.after
            mark = ">>" if row is refusal else "* " if row in evidence else ""
            result = f"{after['status']} {after.get('duration_ms', '')} ms" if after else entry.get("reason", "")
            shown[entry["id"]] = (
                Text(mark, style="bold reverse" if mark else ""), show.at(int(entry["ms"])), entry.get("step", ""),
                entry.get("agent", ""), f"{SIGNS[row.kind]} {row.kind if row.kind != 'note' else entry['op']}",
                " ".join(filter(None, (entry.get("tool"), entry.get("args"), entry.get("key")))), result,
            )  # fmt: skip
        self.fill(self.query_one(DataTable), shown)

    def _ask(self, verb: str, method: str, more: Fields) -> None:
        async def act(values: dict[str, str]) -> None:
            limits = values.pop("limits", "")
            params: dict[str, Any] = {"run": self.run, **values}
            if limits:
                params["limits"] = {
                    name: int(value) for name, _, value in (each.partition("=") for each in limits.split())
                }
            await self.guard.call(method, params)

        self.app.push_screen(Ask(f"{verb} {self.run}?", {"note": ("Why", None), **more}, act), self.look_again)

    def action_kill(self) -> None:
        """Asks, then kills."""
        reasons = ("incident_stop", "operator_cancelled_loop", "killed")
        self._ask("Kill", "kill", {"reason": ("Reason; a kill cannot be resumed", reasons)})

    def action_freeze(self) -> None:
        """Asks, then freezes."""
        self._ask("Freeze", "freeze", {"scope": ("What waits", ("all", "effects", "retries", "handoffs", "subruns"))})

    def action_resume(self) -> None:
        """Asks, then resumes."""
        changes = ("human_input", *(each for each in RESUME_CHANGES if each != "human_input"))
        self._ask(
            "Resume", "resume", {"change": ("What changed", changes), "limits": ("Limits (such as max_steps=90)", None)}
        )


class Doubts(View):
    """Effects in doubt over all runs; Enter settles one."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "app.pop_screen", "Back"), ("q", "app.quit", "Quit")]

    def compose(self) -> ComposeResult:
        """See textual."""
        yield Header()
        yield Static("In doubt: look into the outside system, then press Enter on one to settle it.")
        yield DataTable(id="doubts", cursor_type="row")
        yield Footer()

    def on_mount(self) -> None:
        """See textual."""
        table = self.query_one(DataTable)
        table.add_columns("key", "tool", "run", "since")
        table.focus()
        self._found: dict[str, dict[str, Any]] = {}
        super().on_mount()

    async def refresh_state(self) -> None:
        """See View."""
        found = await self.guard.call("ledger", {"in_doubt": True, "limit": 200})
        self._found = {f"{each['run']} {each['scope']} {each['tool']} {each['key']}": each for each in found}
        rows = {
            name: (each["key"], each["tool"], each["run"], show.at(each["until_ms"]))
            for name, each in self._found.items()
        }
        self.fill(self.query_one(DataTable), rows)

    @on(DataTable.RowSelected)
    def settle(self, event: DataTable.RowSelected) -> None:
        """Asks what is true."""
        effect = self._found[str(event.row_key.value)]

        async def act(values: dict[str, str]) -> None:
            named = {
                "run": effect["run"],
                "tool": effect["tool"],
                "idempotency_key": effect["key"],
                "scope": effect["scope"],
            }
            await self.guard.call("resolve", {**named, **values})

        states = ("not_executed", "committed")
        fields: Fields = {
            "note": ("Why", None), "state": ("In the outside system it was", states),
            "operation_id": ("Its name there (if it was)", None),
        }  # fmt: skip
        self.app.push_screen(Ask(f"Settle {effect['key']} of {effect['tool']}?", fields, act), self.look_again)


def state_of(run: dict[str, Any]) -> str:
    """As an operator says it."""
    return "frozen" if run["freeze"] and run["status"] == "running" else str(run["status"])


def bars(state: dict[str, Any]) -> list[str]:
    """Limits that are set, as bars of characters."""
    lines = []
    for label, used, name in BARS:
        most = state["limits"].get(name)
        if most:
            now = state["counters"].get(used, 0) + state["counters"].get(f"held_{used}", 0)
            full = min(BAR_WIDTH, now * BAR_WIDTH // most)
            lines.append(f"{label:<12} [{'#' * full}{'.' * (BAR_WIDTH - full)}] {now} of {most}")
    return lines


class Top(App[None]):
    """The whole of it."""

    TITLE = "guardd"
    SCREENS: ClassVar[dict[str, Callable[[], Screen[Any]]]] = {"doubts": Doubts}
    CSS = """
    #banner { height: auto; text-style: bold; }
    #facts { height: auto; max-height: 45%; }
    DataTable { height: 1fr; }
    Ask { align: center middle; }
    #ask { width: 70; max-width: 100%; height: auto; max-height: 100%; border: round $error; padding: 0 1; background: $surface; }
    #ask Horizontal { height: auto; }
    #ask-error { color: $error; height: auto; }
    """

    def __init__(self, guard: AsyncGuard) -> None:
        super().__init__()
        self.guard = guard
        guard.on_event = self.heard

    def heard(self, _: dict[str, Any]) -> None:
        """An event: what is shown may have changed."""
        if isinstance(self.screen, View):
            self.screen.look()

    async def on_mount(self) -> None:
        """See textual."""
        self.push_screen(Runs())
        try:
            await self.guard.connection.watch("")
        except GuardUnavailable as error:
            self.sub_title = str(error)
