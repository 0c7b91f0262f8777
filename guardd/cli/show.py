"""Answers as text for a person at a terminal."""

from __future__ import annotations

import datetime as dt
from typing import Any

from guardd.cli.timeline import evidence_of, rows_of


def at(ms: int | None) -> str:
    """A time, local."""
    return "-" if not ms else dt.datetime.fromtimestamp(ms / 1000).astimezone().strftime("%H:%M:%S.%f")[:-3]


def answer(said: dict[str, Any]) -> str:
    """Action, reason and, for a stop, the envelope's first words."""
    text = " ".join(filter(None, (said.get("action", ""), said.get("reason", ""))))
    if envelope_of := said.get("envelope"):
        text += "\n" + envelope(envelope_of)
    return text


def labels(run: dict[str, Any]) -> str:
    """`name=value` of each."""
    return " ".join(f"{name}={value}" for name, value in run["labels"].items())


def runs(found: list[dict[str, Any]]) -> str:
    """A line a run."""
    if not found:
        return "no runs"
    lines = [f"{'RUN':<32} {'STATUS':<9} {'REASON':<22} {'STEPS':>5} {'DENIED':>6}  {'LAST':<12}  LABELS"]
    for run in found:
        status = "frozen" if run["freeze"] and run["status"] == "running" else run["status"]
        counters = run["counters"]
        lines.append(
            f"{run['run']:<32} {status:<9} {run['reason'] or run['freeze']:<22} {counters['steps']:>5} {counters['denied']:>6}  {at(run['last_ms']):<12}  {labels(run)}".rstrip()
        )
    return "\n".join(lines)


def state(run: dict[str, Any]) -> str:
    """One run as an operator reads it."""
    lines = [f"run        {run['run']}   epoch {run['epoch']}", f"status     {run['status']} {run['reason']}".rstrip()]
    if run["freeze"]:
        lines.append(f"frozen     {run['freeze']}")
    if run["labels"]:
        lines.append(f"labels     {labels(run)}")
    lines.append(f"policy     {run['policy']}   started {at(run['started_ms'])}   last {at(run['last_ms'])}")
    counters = {name: value for name, value in run["counters"].items() if value}
    lines.append("counters   " + (" ".join(f"{name}={value}" for name, value in counters.items()) or "none"))
    lines.append("limits     " + " ".join(f"{name}={value}" for name, value in run["limits"].items()))
    lines.append(f"progress   version {run['progress']['version']} at {at(run['progress']['at'])}")
    if run["window"]:
        lines.append(
            "window     "
            + " ".join(f"{entry['step']}:{entry['tool'] or entry['fingerprint']}" for entry in run["window"])
        )
    for repeat in run["repeats"]:
        lines.append(f"repeats    {repeat['count']} x {repeat['tool']} {repeat['fingerprint']}")
    if run["in_flight"]:
        lines.append("in flight  " + " ".join(run["in_flight"]))
    for effect in run["operations"]:
        lines.append(f"effect     {effect['tool']} {effect['key']} {effect['state']} {effect['operation_id']}".rstrip())
    if run["handoff_path"]:
        lines.append("handoffs   " + " > ".join(run["handoff_path"]))
    if envelope_of := run.get("envelope"):
        lines.append(envelope(envelope_of))
    return "\n".join(lines)


def envelope(said: dict[str, Any]) -> str:
    """Why a run ended, and what to do next."""
    lines = [f"ended      {said['status']}: {said['reason']} (by {said['ended_by']}), next: {said['next_action']}"]
    if guard := said.get("guard"):
        lines.append("rule       " + " ".join(f"{name}={value}" for name, value in guard.items()))
    if denied := said.get("denied_call"):
        lines.append(f"refused    {denied.get('agent', '')} {denied.get('tool', '')} {denied.get('args', '')}".rstrip())
    lines += [
        f"doubt      {effect['tool']} {effect['key']}: look it up outside, then guardd resolve"
        for effect in said["operations"]
        if effect["state"] == "in_doubt"
    ]
    if said["in_flight"]:
        lines.append("in flight  " + " ".join(said["in_flight"]))
    return "\n".join(lines)


def trace(entries: list[dict[str, Any]]) -> str:
    """A line an operation, oldest first; calls that the last refusal names as evidence are marked with *."""
    refusal, evidence = evidence_of(rows_of(entries))
    marked = {row.entry["id"] for row in evidence} | ({refusal.entry["id"]} if refusal else set())
    lines = [("* " if entry["id"] in marked else "  ") + trace_line(entry) for entry in entries]
    return "\n".join(lines) or "no entries"


def trace_line(entry: dict[str, Any]) -> str:
    """One operation."""
    given = (entry.get("agent"), entry.get("tool"), entry.get("args") or entry.get("status"), entry.get("key"))
    what = " ".join(filter(None, given))
    said = " ".join(filter(None, (entry.get("action"), entry.get("reason"))))
    shown = ("limit", "observed", "steps", "would", "outcome", "claim")
    evidence = " ".join(f"{name}={entry[name]}" for name in shown if name in entry)
    return f"{at(int(entry['ms']))} {entry['run']:<20} {entry['op']:<9} {what:<56} {said} {evidence}".rstrip()


def event(said: dict[str, Any]) -> str:
    """One event that watchers hear."""
    more = " ".join(f"{name}={said[name]}" for name in ("reason", "by", "scope", "change") if name in said)
    return (
        f"{at(int(said.get('published_ms', 0)))} {said.get('run', ''):<32} {said.get('event', ''):<9} {more}".rstrip()
    )


def harmless(text: str) -> str:
    """What a terminal would take as a command becomes visible: an agent may have written it."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def ledger(found: list[dict[str, Any]]) -> str:
    """A line an effect."""
    if not found:
        return "nothing is claimed or in doubt"
    return "\n".join(
        f"{effect['state']:<9} {effect['run']:<24} {effect['tool']} {effect['key']}  lease until {at(effect['until_ms'])}"
        for effect in found
    )


def deny_rules(found: list[dict[str, Any]]) -> str:
    """A line a rule."""
    if not found:
        return "no tool is forbidden"
    lines = [f"{'RULE':<20} {'TOOL':<30} {'RUNS':<24} {'UNTIL':<19}  WHY"]
    for rule in found:
        until = _day(rule["until_ms"]) if rule["until_ms"] else "removed"
        lines.append(
            f"{rule['id']:<20} {rule['tool']:<30} {rule['run_prefix'] or 'all':<24} {until:<19}  {rule['note']}".rstrip()
        )
    return "\n".join(lines)


def incident(found: dict[str, Any]) -> str:
    """What was done, and what is left to do."""
    lines = [f"stopped ({found['reason']}); all about it is in {found['file']}"]
    lines += [
        f"in doubt: {effect['tool']} {effect['key']}: look it up outside, then guardd resolve"
        for effect in found["in_doubt"]
    ]
    return "\n".join(lines)


def tokens(found: list[dict[str, Any]]) -> str:
    """A line a token."""
    lines = [f"{'ID':<12} {'ROLE':<9} {'NAME':<20} {'RUN PREFIX':<20} EXPIRES"]
    for token in found:
        expires = "never" if token["expires_ms"] is None else _day(token["expires_ms"])
        lines.append(
            f"{token['id']:<12} {token['role']:<9} {token['name'] or '-':<20} {token['run_prefix'] or '-':<20} "
            f"{'expired' if token['expired'] else expires}"
        )
    return "\n".join(lines) if found else "no tokens"


def audit(found: list[dict[str, Any]]) -> str:
    """A line an entry."""
    lines = []
    for entry in found:
        more = f" (and {entry['unwritten']} more)" if "unwritten" in entry else ""
        subject = entry["subject"] or "-"
        lines.append(
            f"{_day(entry['at'])}  {entry['outcome']:<8} {entry['method']:<12} {subject:<24} "
            f"{entry['caller']} ({entry['role'] or 'nobody'})  {entry['note']}{more}".rstrip()
        )
    return "\n".join(lines) or "nothing was asked"


def _day(ms: int) -> str:
    return dt.datetime.fromtimestamp(ms / 1000).astimezone().strftime("%Y-%m-%d %H:%M:%S")
