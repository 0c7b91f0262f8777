"""before and after of the model: SPEC 2.2 step by step, and 2.3."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.reference.model import Answer, Refused, answer, canon
from tests.reference.tree import Run

if TYPE_CHECKING:
    from tests.reference.model import ReferenceGuard

CHANGES = {"new_cursor", "retry_after_elapsed", "arguments_corrected", "authorization_renewed", "strategy_changed"}
NEW_ID = ("said", "wait")


def judge(guard: ReferenceGuard, p: dict[str, Any]) -> Answer:
    if p.get("retry") and p["retry"]["change"] not in CHANGES:
        raise Refused("change_required")
    tool, rule = p["tool"], guard.tools.get(p["tool"], {})
    agent, client, args = p.get("agent", ""), p.get("client", ""), p.get("args") or {}
    key = p.get("idempotency_key")
    if key is None and "effect_key" in rule:
        if any(args.get(name) is None for name in rule["effect_key"]):
            raise Refused("effect_key_missing")
        key = json.dumps([canon(args[name], set()) for name in rule["effect_key"]], separators=(",", ":"))
    if key is None and rule.get("requires_key"):
        raise Refused("effect_key_missing")
    volatile = (guard.volatile | set(rule.get("volatile_args", ()))) - set(rule.get("keep_args", ()))
    fp = tool + json.dumps(canon(args, volatile), sort_keys=True)
    root = p["run"].split("/")[0]
    is_global = "global" in (p.get("scope"), rule.get("effect_scope"))
    name = ("*" if is_global else root, tool, key) if key is not None else None

    guard.tick(root)
    chain, refused = guard.enter(p["run"])
    if refused and refused["action"] == "deny":
        return refused
    tree = guard.trees[root]
    known = tree.calls.get(p["call"])
    is_mine = bool(known) and known["client"] == client and not known["done"]
    if known and is_mine and (known["run"], known["name"], known["fp"]) != (p["run"], name, fp):
        raise Refused("call_conflict")
    if known and not is_mine and (known["run"] != p["run"] or name is None):
        raise Refused("call_conflict")

    def say(said: Answer, **kept: Any) -> Answer:
        """Remembers the first answer; what is in flight keeps its own."""
        if not known:
            tree.calls[p["call"]] = {"client": client, "run": p["run"], "name": name, "fp": fp, "done": False,
                                     "open": False, "counted": False, "first": said} | kept  # fmt: skip
        elif is_mine and not known["open"]:
            known["first"] = said
            known.update(kept)
        return said

    # Steps 1, 2, 3.
    if not known:
        guard.charge_usage(chain, p.get("usage"))
    if ended := guard.ended(chain):
        return say(ended) if p.get("usage") else ended
    scopes = {"all"} | ({"retries"} if p.get("retry") else set())
    if name or not rule.get("read_only"):
        scopes.add("effects")
    if waits := refused or guard.paused(chain, scopes):
        return say(waits)
    own = chain[-1]

    def ask_ledger() -> Answer | None:
        assert name is not None
        state, left = guard.ledger.look(name, fp, guard.now)
        if state == "conflict":
            return say(guard.refuse(own, agent, "key_conflict"))
        if state == "committed":
            cap, is_counted = own.limits["max_replays"], is_mine and known["counted"]
            if cap is not None and not is_counted and own.replays[name] >= cap:
                return say(guard.refuse(own, agent, "same_call_repeat"))
            if not is_counted:
                own.replays[name] += 1
            return say(answer("replay", "already_committed"), **({"counted": True} if is_mine else {}))
        if state == "claimed":
            return say(answer("wait", "in_flight", retry_after_ms=left))
        if state == "in_doubt" and rule.get("on_in_doubt") != "reclaim":
            return say(guard.refuse(own, agent, "in_doubt"))
        return None

    # A known id.
    if known and is_mine and known["open"]:
        record = guard.ledger.records.get(name) if name else None
        is_owner = record and record.owner == p["call"] and record.state == "claimed" and record.until > guard.now
        if not name or is_owner:
            return answer("execute")
        if said := ask_ledger():
            return said
        raise Refused("call_conflict")
    if known and is_mine and known["first"]["action"] == "deny":
        return known["first"]  # type: ignore[no-any-return]

    # Step 4.
    if found := guard.capped(chain, with_steps=True):
        guard.end(found[0], found[1], "cap")
        ended = guard.ended(chain) or {}
        return say(ended) if p.get("usage") and not known else ended
    if reason := guard.unfit(chain, p.get("reserve")):
        return say(answer("deny", reason))
    guard.progress(own, p.get("progress_version"))
    if known and not is_mine:
        if said := ask_ledger():
            return said
        raise Refused("call_conflict")

    # Steps 5 to 8.
    if fp in own.refused:
        return say(guard.refuse(own, agent, own.refused[fp]))
    if (left := own.retry_at.get(fp, 0) - guard.now) > 0:
        return say(answer("wait", "retry_too_early", retry_after_ms=left))
    most = rule.get("max_empty", own.limits["max_empty"])
    if most is not None and own.empties[tool] >= most:
        return say(guard.refuse(own, agent, "empty_result"))
    if name and (said := ask_ledger()):
        return said

    # Steps 9 and 10.
    is_retry = bool(p.get("retry")) and (fp in own.last or own.in_flight[fp] > 0)
    most = rule.get("max_retries", own.limits["max_retries"])
    if is_retry and most is not None and own.retries[fp] >= most:
        return say(guard.refuse(own, agent, "retry_cap"))
    window = window_of(own, agent, rule)
    target = tool + json.dumps([canon(args.get(each), set()) for each in rule.get("target_args", ())])
    if not is_retry:
        same = rule.get("max_same_call", own.limits["max_same_call"])
        span = max(own.limits["cycle_window"], same or 0)
        if same is not None and [each for each, _ in window[-span:]].count(fp) >= same:
            return say(guard.refuse(own, agent, "same_call_repeat"))
        most = rule.get("max_same_target", own.limits["max_same_target"])
        if rule.get("target_args") and most is not None and own.targets[target] >= most:
            return say(guard.refuse(own, agent, "same_target_repeat"))
        history = [each for each, is_exempt in window if not is_exempt] + [fp]
        for n in range(2, own.limits["max_cycle_period"] + 1):
            block = history[-n:]
            is_cycle = len(history) >= 2 * n and block == history[-2 * n : -n] and len(set(block)) > 1
            if is_cycle and not rule.get("cycle_exempt"):
                return say(guard.refuse(own, agent, "short_cycle"))

    # Step 11.
    for run in chain:
        run.steps += 1
    if is_retry:
        own.retries[fp] += 1
    else:
        window.append((fp, bool(rule.get("cycle_exempt"))))
        own.targets[target] += 1
    guard.hold(chain, p.get("reserve"), 1)
    if name:
        guard.ledger.claim(name, p["call"], fp, guard.now + guard.limits["claim_lease_ms"])
    own.in_flight[fp] += 1
    own.streaks.pop(agent, None)
    say(answer("execute"))
    tree.calls[p["call"]] |= {"open": True, "tool": tool, "is_retry": is_retry, "round": own.round_number,
                              "reserve": p.get("reserve"), "target": target}  # fmt: skip
    return answer("execute")


def window_of(own: Run, agent: str, rule: dict[str, Any]) -> list[tuple[str, bool]]:
    scope = rule.get("window_scope", own.limits["window_scope"])
    if scope == "tree":
        return own.tree.window
    return own.agent_windows.setdefault(agent, []) if scope == "agent" else own.window


def report(guard: ReferenceGuard, p: dict[str, Any]) -> Answer:
    root = p["run"].split("/")[0]
    tree = guard.trees.get(root)
    known = tree.calls.get(p["call"]) if tree else None
    if not known or known["run"] != p["run"] or not known["open"]:
        raise Refused("unknown_call")
    if known["done"]:
        return known["first_after"]  # type: ignore[no-any-return]
    guard.tick(root)
    chain, _ = guard.enter(p["run"], make=False)
    own, fp, tool, status = chain[-1], known["fp"], known["tool"], p["status"]
    rule = guard.tools.get(tool, {})
    is_done = status in ("progress", "complete")
    is_blank = (
        is_done
        and "value" in p
        and not rule.get("allow_empty")
        and (p["value"] is None or str(p["value"]).strip() == "")
    )
    is_success = is_done and not is_blank
    guard.charge_usage(chain, p.get("usage"))
    guard.hold(chain, known["reserve"], -1)

    said = p.get("side_effect_committed")
    frees = status in ("permission_denied", "policy_blocked", "invalid_input", "human_required")
    outcome = "commit" if said or (said is None and is_success) else "free" if said is False or frees else "doubt"
    is_stale = bool(known["name"]) and not guard.ledger.report(known["name"], p["call"], outcome)

    moved = not is_blank and guard.progress(own, p.get("progress_version"))
    was_admitted_since = known["round"] == own.round_number
    if is_success and "progress" in rule and "value" in p:
        moved = derive(own, known["target"], rule["progress"], p["value"]) or moved

    if is_blank:
        own.empties[tool] += 1
    elif is_success:
        own.empties[tool] = 0
    own.in_flight[fp] -= 1
    own.last.pop(fp, None)
    own.retry_at.pop(fp, None)
    is_refusal = status in ("permission_denied", "policy_blocked")
    if is_success:
        own.retries[fp] = 0
    elif is_blank or status == "retryable":
        own.last[fp] = status
        if status == "retryable" and p.get("retry_after_ms") is not None:
            own.retry_at[fp] = guard.now + p["retry_after_ms"]
    elif status == "invalid_input" or (is_refusal and own.limits["on_refusal"] == "deny"):
        own.refused[fp] = status

    if not guard.ended(chain):
        if status == "fatal" or (status == "complete" and is_success):
            guard.end(own, status, "result")
        elif is_refusal and own.limits["on_refusal"] == "stop":
            guard.end(own, status, "refusal")
        elif status == "human_required":
            own.is_waiting = True
        elif own.reports and not moved and was_admitted_since and not rule.get("no_progress_exempt"):
            if not (status == "retryable" and known["is_retry"]):
                own.rounds += 1
                own.round_number += 1
                if own.limits["max_no_progress"] is not None and own.rounds >= own.limits["max_no_progress"]:
                    guard.end(own, "no_progress", "rule")
    result = guard.state(chain)
    if result["action"] == "continue" and is_blank:
        result = answer("continue", "empty_result")
    if is_stale:
        result["claim"] = "stale"
    known["done"], known["first_after"] = True, result
    return result


def derive(own: Run, target: str, rule: dict[str, Any], value: Any) -> bool:
    """Progress read from a result (SPEC 2.4)."""
    reading = value.get(rule["pointer"].removeprefix("/")) if isinstance(value, dict) else None
    if reading is None:
        return False
    own.reports = True
    seen = own.seen.setdefault(target, [])
    if rule["when"] == "new":
        confirmed = bool(seen) and reading not in seen
        if not seen or confirmed:
            seen.append(reading)
    else:
        best = (max if rule["when"] == "increases" else min)(seen) if seen else None
        confirmed = best is not None and (reading > best if rule["when"] == "increases" else reading < best)
        seen.append(reading)
    if confirmed:
        own.clear()
    return confirmed
