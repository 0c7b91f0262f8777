"""Whether the store is still the one it was: the canary of each primary (SPEC 5).

A canary is a small hash without expiry: `id` names this life of the store,
`beat` is raised by every batch of scripts. A beat that is not higher than one
that was acknowledged before, or a canary that is gone or has another id, means
that the store was flushed, rolled back or replaced. Then effects it knew may be
forgotten, so nothing is granted until an operator has looked and confirms.

Others may beat on while one primary is cut off, and so pass what was lost
with it. So a daemon with a state directory raises a beat of its own, too
(`beat:<daemon>`): that one nobody else can lift over its mark.

A daemon that noticed writes `suspect` into the canary: all others stop within
a second. `confirmed` is a new random word each time an operator confirms.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guardd.keys import Key
from guardd.store.base import Command, Reply, Unproved

Execute = Callable[..., Awaitable[list[Any]]]

SETTLE_S = 5.0
"""How long grants wait once replicas are back, or another primary was named: Sentinels tell each other every 2 s,
daemons look every second where the primary is and what its canary says, and one that misses beats tells the others."""

_FIELDS = ("id", "beat", "suspect", "confirmed")
_CURE = "look what is missing, then: guardd doctor --confirm"


@dataclass(slots=True)
class Known:
    """What this daemon knows of one canary: the beat of all, its own. trouble: why it does not trust it, sticky until an operator confirms."""

    id: str = ""
    beat: int = 0
    own: int = 0
    confirms: list[str] = field(default_factory=list)
    trouble: str = ""
    was_seen: bool = False


class Canaries:
    """The canaries of one store.

    Args:
        keys:   one for a server, a fixed set spread over the slots of a Cluster.
        memory: file that keeps what is known over a restart of the daemon; None: nothing is kept.
        name:   of the store, in that file.
        counts_looks: whether a beat that is only looked at counts as one that must stay. Not where replicas
                count: a primary that is cut off shows beats which nobody else has, and loses no promise with them.
        power_loses: the store is on this machine and forgets its last second when the power goes, as this file does.
    """

    def __init__(
        self,
        keys: Sequence[Key],
        *,
        memory: Path | None,
        name: str,
        counts_looks: bool = True,
        power_loses: bool = False,
    ) -> None:
        self.keys = tuple(keys)
        self._counts_looks = counts_looks
        self._power_loses = power_loses
        self._is_clean = False
        self._memory = memory
        self._name = f"{name} {self.keys[0]}"
        self._known = {key: Known() for key in self.keys}
        self._saved = ""
        self._daemon = secrets.token_hex(4)
        self._load()
        self._beats = ("beat", f"beat:{self._daemon}") if memory is not None else ("beat",)

    @property
    def trouble(self) -> str:
        """Why nothing may be granted; "" when every canary is as it was."""
        return next((known.trouble for known in self._known.values() if known.trouble), "")

    # ---- In every batch ------------------------------------------------------------

    def beat(self, key: Key) -> tuple[list[Command], Callable[[list[Reply]], Unproved | None]]:
        """The commands that raise the beats, and who judges by their replies; `keep` then says that they must stay.

        The floor is what was acknowledged before the commands are sent: batches on other connections may be
        answered in any order. An error reply (memory full, slot moved) proves nothing and accuses nobody.
        """
        known = self._known[key]
        floors = (known.beat, known.own)

        def judge(replies: list[Reply]) -> Unproved | None:
            for name, reply, floor in zip(self._beats, replies, floors, strict=False):
                if isinstance(reply, int) and reply <= floor:
                    known.trouble = known.trouble or _went_back(key, name, reply, floor)
                    return Unproved(known.trouble, value="rolled back", spares_records=True)
            return None

        return [("HINCRBY", key, name, 1) for name in self._beats], judge

    def keep(self, key: Key, replies: list[Reply]) -> None:
        """These beats are as durable as the answers of their batch: lower ones later mean a loss."""
        beat, own = (*(reply if isinstance(reply, int) else 0 for reply in replies), 0)[:2]
        self._raise(key, beat, own)

    def _raise(self, key: Key, beat: int, own: int) -> None:
        known = self._known[key]
        known.beat, known.own = max(known.beat, beat), max(known.own, own)

    # ---- Every second ----------------------------------------------------------------

    async def prove(self, execute: Execute) -> None:
        """Compares every canary with what is known; makes those of a new store; tells the others of trouble.

        Raises: StoreUnavailable.
        """
        floors = {key: (known.beat, known.own) for key, known in self._known.items()}  # as of before the question
        found = await execute(*(("HMGET", key, *_FIELDS, self._beats[-1]) for key in self.keys))
        commands: list[Command] = []
        for key, reply in zip(self.keys, found, strict=True):
            identity, shown, suspect, confirmed, shown_own = (value.decode() if value else "" for value in reply)
            beats = int(shown or 0), int(shown_own or 0) if len(self._beats) > 1 else 0
            known = self._known[key]
            is_new_word = bool(confirmed) and confirmed not in known.confirms
            if is_new_word:
                known.confirms.append(confirmed)
            if is_new_word and known.was_seen:
                known.id, known.trouble = identity, ""
                known.beat, known.own = beats if self._counts_looks else (0, 0)
                continue
            known.was_seen = True
            known.trouble = known.trouble or self._compare(key, known.id, floors[key], identity, beats) or suspect
            if known.trouble and not suspect:
                commands.append(("HSET", key, "suspect", known.trouble, "suspect_ms", time.time_ns() // 1_000_000))
            elif not known.trouble and not identity:
                commands.append(("HSETNX", key, "id", secrets.token_hex(8)))
            elif not known.trouble:
                known.id = identity
                if self._counts_looks:
                    self._raise(key, *beats)
        if commands:
            await execute(*commands)
            if any(command[0] == "HSETNX" for command in commands):
                await self.prove(execute)
        self._save()

    def _compare(self, key: Key, known_id: str, floors: tuple[int, int], identity: str, beats: tuple[int, int]) -> str:
        if known_id and not identity:
            return f"the canary {key} is gone: the store was flushed, or it is another one; {_CURE}"
        if known_id and identity != known_id:
            return f"the canary {key} is of another store ({identity}, {known_id} was known); {_CURE}"
        for name, beat, floor in zip(self._beats, beats, floors, strict=False):
            if beat < floor:
                return _went_back(key, name, beat, floor)
        return ""

    async def confirm(self, execute: Execute) -> None:
        """Lifts the trouble of every canary, for every daemon.

        Raises: StoreUnavailable.
        """
        word = secrets.token_hex(8)
        commands: list[Command] = []
        for key in self.keys:
            commands += [
                ("HSETNX", key, "id", secrets.token_hex(8)),
                ("HDEL", key, "suspect", "suspect_ms"),
                ("HSET", key, "confirmed", word, "confirmed_ms", time.time_ns() // 1_000_000),
            ]
        await execute(*commands)
        await self.prove(execute)

    # ---- Over a restart of the daemon ------------------------------------------------

    def close(self) -> None:
        """The daemon ends in good order."""
        self._is_clean = True
        if any(known.was_seen for known in self._known.values()):
            self._save()

    def _load(self) -> None:
        if self._memory is None or not self._memory.exists():
            return
        stores = json.loads(self._memory.read_text(encoding="utf-8"))
        for key, kept in stores.get(self._name, {}).items():
            if key in self._known:
                self._daemon = kept.get("daemon", self._daemon)
                own = kept.get("own", 0)
                known = Known(kept["id"], kept["beat"], own, list(kept["confirms"]), was_seen=True)
                if self._power_loses and not kept.get("is_clean") and kept.get("boot") != boot_id():
                    known.trouble = f"this machine went down while its store was written once a second; {_CURE}"
                self._known[Key(key)] = known

    def _save(self) -> None:
        if self._memory is None:
            return
        kept = {
            key: {
                "id": known.id, "beat": known.beat, "daemon": self._daemon, "own": known.own, "confirms": known.confirms,
                "boot": boot_id(), "is_clean": self._is_clean,
            }
            for key, known in self._known.items()
        }  # fmt: skip
        text = json.dumps(kept)
        if text == self._saved:
            return
        stores = json.loads(self._memory.read_text(encoding="utf-8")) if self._memory.exists() else {}
        stores[self._name] = kept
        scratch = self._memory.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(stores), encoding="utf-8")
        scratch.replace(self._memory)
        self._saved = text


def boot_id() -> str:
    """Names this life of the machine; "" where the system does not tell."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text(encoding="ascii").strip() if path.exists() else ""


def _went_back(key: Key, name: str, beat: int, floor: int) -> str:
    whose = "" if name == "beat" else f" ({name})"
    return f"the store went back: its canary {key} says {beat}{whose}, {floor} was seen before; {_CURE}"


class BatchProof:
    """Ends a batch with the canary's beat, and with WAIT where replicas count.

    WAIT counts replicas for the last write of this connection only (Valkey) or of the whole server (Redis);
    the beat before it is such a write, so a batch that only repeats an answer is proved like any other.

    A replica may acknowledge writes of a primary after another one was promoted, and drop them when it hears of
    that one. Who had these acknowledgements misses its beats on the promoted primary; until it can have said so
    nothing is granted there.

    Args:
        canary:   which canary this connection's server holds now; None: none is known.
        replicas: how many must have the writes of a batch; 0: none.
        settle_s: how long grants wait after a failover, or after replicas were short.
    """

    def __init__(
        self,
        canaries: Canaries,
        canary: Callable[[], Key | None],
        *,
        replicas: int,
        wait_ms: int,
        settle_s: float = 0.0,
    ) -> None:
        self._settle_s = settle_s if replicas else 0.0
        self._settled_s = 0.0
        self._canaries = canaries
        self._canary = canary
        self._replicas = replicas
        self._wait_ms = wait_ms

    def unsettle(self) -> None:
        """There may be another primary now: grants wait from the next proved batch on."""
        if self._settle_s:
            self._settled_s = math.inf

    def _settling(self) -> Unproved | None:
        """After a proved batch: whether grants still wait."""
        now = time.monotonic()
        if self._settled_s == math.inf:
            self._settled_s = now + self._settle_s
        if now >= self._settled_s:
            return None
        return Unproved(
            f"the store settles after a failover or a lack of replicas: grants go on in {self._settled_s - now:.1f} s; "
            "send the request again under the same call id",
            value="settling",
            spares_records=True,
        )

    def begin(self) -> tuple[list[Command], Callable[[list[Reply]], Unproved | None]]:
        """See Proof."""
        key = self._canary()
        commands: list[Command] = []
        judge_beat: Callable[[list[Reply]], Unproved | None] = lambda _: None  # noqa: E731
        if key is not None:
            commands, judge_beat = self._canaries.beat(key)
        beats = len(commands)
        if self._replicas:
            commands.append(("WAIT", self._replicas, self._wait_ms))

        def judge(replies: list[Reply]) -> Unproved | None:
            verdict = judge_beat(replies[:beats])
            if verdict is None and self._replicas:
                acknowledged = replies[-1] if isinstance(replies[-1], int) else 0
                if acknowledged < self._replicas or key is None or isinstance(replies[0], Exception):
                    self.unsettle()
                    return Unproved(
                        f"NOREPLICAS: {acknowledged} of {self._replicas} replicas have the write after {self._wait_ms} ms; "
                        "bring them back, then send the request again under the same call id",
                        value="NOREPLICAS",
                    )
            if verdict is None and key is not None:
                self._canaries.keep(key, replies[:beats])
                verdict = self._settling()
            return verdict

        return commands, judge
