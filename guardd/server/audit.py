"""The audit: who asked what of an operator's operations, in two copies (a hash-chained file, a stream in the store).

Each line of the file names the SHA-256 of the line before it, so a line that
was changed, taken out or put in is found. What permits something waits until
both copies hold the line `asked`; what stops something goes on when one does,
for stopping must work with a full disk and a slow one.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import structlog

from guardd.engine.audit import AuditStream
from guardd.engine.tokens import hide_tokens
from guardd.model.errors import AuditStoreUnavailable, AuditUnavailable, GuardError, StoreUnavailable

log = structlog.get_logger()

Outcome = Literal["asked", "done", "refused", "failed"]
Entry = dict[str, str | int]

FIRST = "0" * 64
NOTE_CHARACTERS_MAX = 256
WRITE_TIMEOUT_S = 5.0
WAITING_MAX = 256
"""Lines waiting for the disk; beyond them the file counts as not writable."""
REFUSED_PER_S_MAX = 10
CALLERS_MAX = 1024
TAIL_BYTES = 16_384


class AuditFile:
    """One append-only file that several processes may write to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, entry: Entry) -> None:
        """Writes one line and waits until the disk has it.

        Raises: OSError: it was not written, or not wholly; what was written of it is taken back.
        """
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            size = os.fstat(descriptor).st_size
            tail = os.pread(descriptor, TAIL_BYTES, max(0, size - TAIL_BYTES)) if size else b""
            # A line that a crash cut off is a line all the same: the chain goes over it, and `verify` shows it.
            torn = b"" if not tail or tail.endswith(b"\n") else b"\n"
            last = tail.rstrip(b"\n").rpartition(b"\n")[2]
            line = json.dumps({**entry, "prev": _digest(last) if last else FIRST}, ensure_ascii=False).encode()
            try:
                if os.write(descriptor, written := torn + line + b"\n") != len(written):
                    raise OSError(f"{self.path} took a part of a line only")
                os.fsync(descriptor)
            except OSError:
                if size:
                    os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class Verdict:
    """What a look at a chain found. line: the first that does not fit, from 1; 0: all fit."""

    lines: int
    line: int = 0
    why: str = ""


def verify(path: Path) -> Verdict:
    """Checks every line of a file against the one before it.

    Raises: OSError: it cannot be read.
    """
    expected, number = FIRST, 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            line = raw.rstrip(b"\n")
            try:
                entry = json.loads(line)
            except ValueError:
                return Verdict(number, number, "this line is no entry: it was changed, or a crash cut it off")
            if not isinstance(entry, dict) or entry.get("prev") != expected:
                return Verdict(number, number, "the line before it was changed, taken out or put in")
            expected = _digest(line)
    return Verdict(number)


class Audit:
    """Both copies.

    Args: file: of this state directory. stream: of the store; another one after a reload.
    """

    def __init__(self, file: AuditFile, stream: AuditStream) -> None:
        self.stream = stream
        self._file = file
        # One thread: lines reach the file in the order in which they were asked for.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="guardd-audit")
        self._waiting = 0
        self.on_refused: Callable[[], None] = lambda: None
        self.on_unwritten: Callable[[], None] = lambda: None
        self._tasks: set[asyncio.Task[None]] = set()
        self._refused: dict[str, tuple[int, int, Entry]] = {}
        """By caller: the second, refusals in it, and the newest one's entry with how many were not written."""

    async def write(self, entry: Entry, *, copies: int) -> None:
        """Returns once so many copies, 1 or 2, hold the entry; the other one is still tried.

        Raises: AuditUnavailable: fewer could be written in 5 s. AuditStoreUnavailable: because the store is out of
        reach; nothing was done, and clients send the same again.
        """
        entry = {"at": time.time_ns() // 1_000_000, "id": secrets.token_hex(8), **entry}
        pending = {self._start(self._to_file(entry)), self._start(self.stream.add(entry))}
        deadline = time.monotonic() + WRITE_TIMEOUT_S
        errors: list[str] = []
        is_store_lost = False
        while copies and pending and not (copies == 2 and errors):
            left_s = max(0.0, deadline - time.monotonic())
            done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                errors.append("no answer in time")
                break
            failed = [error for task in done if (error := task.exception()) is not None]
            errors += [_sentence(error) for error in failed]
            is_store_lost |= any(isinstance(error, StoreUnavailable) for error in failed)
            copies -= len(done) - len(failed)
        if copies > 0:
            kind = AuditStoreUnavailable if is_store_lost else AuditUnavailable
            raise kind(
                f"the audit cannot be written, so nothing was done: {'; '.join(errors)}; mend it and ask again "
                "(kill, freeze and deny rules go through as long as one copy can be written)",
                field="audit", value=str(self._file.path), limit="the file and the store",
            )  # fmt: skip

    async def note(self, entry: Entry, *, copies: int = 1) -> None:
        """Writes what became of something; it has happened, so a copy that fails is logged only."""
        try:
            await self.write(entry, copies=copies)
        except AuditUnavailable as error:
            log.error("audit.unwritten", error=error.message, method=entry["method"])

    async def refused(self, entry: Entry) -> None:
        """Writes a refused attempt: ten a second of a caller, the rest counted in the next line of it."""
        self.on_refused()
        caller, second = str(entry["caller"]), int(time.monotonic())
        began, count, kept = self._refused.get(caller, (second, 0, {}))
        unwritten = int(kept.get("unwritten", 0))
        count = count + 1 if began == second else 1
        if count > REFUSED_PER_S_MAX or len(self._refused) >= CALLERS_MAX:
            self._refused[caller] = (second, count, {**entry, "unwritten": unwritten + 1})
            return
        self._refused[caller] = (second, count, {})
        await self.note(entry | ({"unwritten": unwritten} if unwritten else {}))

    async def flush(self) -> None:
        """Writes the counts of refusals that no line has told yet; asked every second."""
        now = int(time.monotonic())
        for caller, (second, _, kept) in list(self._refused.items()):
            if second == now:
                continue
            del self._refused[caller]
            if kept:
                others = int(kept.pop("unwritten")) - 1
                await self.note(kept | ({"unwritten": others} if others else {}))

    async def probe(self) -> None:
        """Makes the file, and says so in the log when that fails."""
        try:
            await asyncio.to_thread(os.close, os.open(self._file.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
        except OSError as error:
            log.error("audit.unwritten", error=str(error))

    async def close(self) -> None:
        """Waits for what is being written, as long as a write may take."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=WRITE_TIMEOUT_S)
        self._thread.shutdown(wait=False)

    async def _to_file(self, entry: Entry) -> None:
        if self._waiting >= WAITING_MAX:
            raise OSError(f"{self._file.path}: {self._waiting} lines wait for the disk")
        self._waiting += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._file.append, entry)
        finally:
            self._waiting -= 1

    def _start(self, writing: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(writing)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.on_unwritten()
            log.error("audit.unwritten", error=_sentence(error))


def entry_text(text: object) -> str:
    """A member of an entry: text, short, and no token of ours in it."""
    return hide_tokens(text)[:NOTE_CHARACTERS_MAX] if isinstance(text, str) else ""


def _sentence(error: BaseException) -> str:
    return error.message if isinstance(error, GuardError) else str(error)


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
