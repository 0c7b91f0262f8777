"""The one border where the driver's errors become the guard's (SPEC 5).

Whatever the store says that is no answer means: unavailable, the tool does not
run. The message says in which way, and what to do about it.
"""

from __future__ import annotations

import re

from redis import exceptions as driver

from guardd.model.errors import ERRORS, BadArgument, GuardError, StoreUnavailable

UNAVAILABLE: dict[str, str] = {
    "LOADING": "the server is still loading its data; wait until it is ready",
    "BUSY": "a script has held the server for too long; an operator may end it with SCRIPT KILL",
    "UNKILLABLE": "a script that has written holds the server; only SHUTDOWN NOSAVE is left",
    "MISCONF": "the server cannot save to its disk and refuses writes; free the disk",
    "OOM": "the server's memory is full; raise maxmemory (results and kills are still taken)",
    "READONLY": "this server is a replica; connect to the primary",
    "NOREPLICAS": "too few replicas are in sync; bring them back",
    "MASTERDOWN": "the replica has lost its primary; connect to the primary",
    "CLUSTERDOWN": "the cluster has no majority; bring its nodes back",
    "TRYAGAIN": "the slot of this run is moving; send the request again under the same call id",
    "MOVED": "this is a cluster node; use a redis+cluster:// URL",
    "ASK": "this is a cluster node; use a redis+cluster:// URL",
    "CROSSSLOT": "this is a cluster node; use a redis+cluster:// URL",
    "NOPERM": "the ACL user lacks a right; see docs/store.md for the rights guardd needs",
    "NOAUTH": "the server wants a password; put it into the store URL",
    "WRONGPASS": "the server refused user or password of the store URL",
    "WRONGTYPE": "a key of guardd holds another type; something else writes under its prefix",
    "NOSCRIPT": "the server forgot a script twice in a row; send the request again under the same call id",
}
"""First word of an error reply -> what it means and what to do."""

# The driver takes the first word off the errors that it has a class for.
_CLASSES: tuple[tuple[type[Exception], str], ...] = (
    (driver.NoScriptError, "NOSCRIPT"),
    (driver.BusyLoadingError, "LOADING"),
    (driver.ReadOnlyError, "READONLY"),
    (driver.OutOfMemoryError, "OOM"),
    (driver.NoPermissionError, "NOPERM"),
    (driver.MasterDownError, "MASTERDOWN"),  # a ClusterDownError to the driver
    (driver.ClusterDownError, "CLUSTERDOWN"),
    (driver.TryAgainError, "TRYAGAIN"),
    (driver.MovedError, "MOVED"),
    (driver.AskError, "ASK"),
    (driver.ClusterCrossSlotError, "CROSSSLOT"),
    (driver.AuthenticationError, "WRONGPASS"),
)

_GUARD = re.compile(r"GUARD_([A-Z_]+) (.*)", re.DOTALL)
_FACT = re.compile(r" (field|value|limit)=(\S+)")


def map_error(error: BaseException, *, where: str) -> GuardError:
    """The guard's error for whatever a driver raised or a server replied.

    Args: where: what was asked of the store, for the message; never a URL with a password.
    """
    if isinstance(error, GuardError):
        return error
    text = str(error)
    if found := _GUARD.search(text):
        return _from_script(found[1], found[2])
    # To the driver a server that loads is a failed connection.
    if (
        isinstance(error, driver.ResponseError | driver.AuthenticationError | driver.BusyLoadingError)
        or "username-password" in text
    ):
        word = next((word for kind, word in _CLASSES if isinstance(error, kind)), "")
        if "username-password" in text:
            word = "WRONGPASS"
        word = word or next((word for word in UNAVAILABLE if re.search(rf"\b{word}\b", text)), "")
        if word:
            return StoreUnavailable(f"{word}: {UNAVAILABLE[word]} ({where})", field="store", value=word)
        return StoreUnavailable(f"the server answered {where} with an error: {_first_line(text)}", field="store")
    if isinstance(error, TimeoutError | driver.TimeoutError):
        return StoreUnavailable(
            f"no answer in time to {where}; it may have happened, send it again under the same call id", field="store"
        )
    return StoreUnavailable(
        f"no connection to the store for {where}: {_first_line(text) or type(error).__name__}; is the server up?",
        field="store",
    )


def _from_script(code: str, text: str) -> GuardError:
    facts = dict(_FACT.findall(text))
    message = _first_line(_FACT.sub("", text))
    kind = BadArgument if code == "BAD_ARG" else ERRORS.get(code.lower())
    if kind is None:
        return StoreUnavailable(f"a script raised the unknown code {code}: {message}", field="store")
    limit = facts.get("limit")
    return kind(
        message,
        field=facts.get("field", ""),
        value=facts.get("value"),
        limit=int(limit) if limit is not None and limit.isdigit() else limit,
    )


def _first_line(text: str) -> str:
    return re.sub(r" script: [0-9a-f]{40}.*", "", text.split("\n", 1)[0]).strip()
