"""One typed stub per script: what each takes, by name and type, as its Lua header says."""

from __future__ import annotations

from guardd.keys import Key
from guardd.scripts.bind import STUBS, Map, script
from guardd.scripts.loader import ScriptError, script_names


@script("open")
def open_run(
    *,
    trace_key: Key,
    run_keys: list[Key],
    now_ms: int | None,
    settings: Map,
    channel: str,
    birth_record: str,
    defaults: str,
    run: str,
    policy: str,
    named: str,
    changes: Map,
    may_loosen: str,
    version: int | None,
    labels: str,
    tools: str,
    known_epoch: str,
) -> None:
    """Make a run known, with its policy, limits and baseline (SPEC 2.10)."""


@script("before")
def before(
    *,
    calls_key: Key,
    trace_key: Key,
    marks_key: Key,
    op_key: Key,
    run_keys: list[Key],
    now_ms: int | None,
    settings: Map,
    channel: str,
    birth_record: str,
    limits: str,
    run: str,
    call: str,
    client: str,
    agent: str,
    tool: str,
    fp: str,
    full_fp: str,
    target: str,
    args: str,
    key: str,
    effect: Map,
    rule: Map,
    retry: str,
    version: int | None,
    usage_map: Map,
    reserve: Map,
    deny_rule: str,
    policy: str,
    known_epoch: str,
) -> None:
    """May this call run now? The rules of SPEC 2.2, in their order."""


@script("after")
def after(
    *,
    calls_key: Key,
    trace_key: Key,
    marks_key: Key,
    op_key: Key,
    run_keys: list[Key],
    now_ms: int | None,
    settings: Map,
    channel: str,
    run: str,
    call: str,
    tool: str,
    op_digest: str,
    status: str,
    verdict: str,
    committed: str,
    version: int | None,
    retry_ms: int | None,
    reading: Map,
    is_exempt: str,
    usage_map: Map,
    value: str,
    value_map: Map,
    operation_id: str,
    global_claim: str,
) -> None:
    """What became of an admitted call (SPEC 2.3)."""


@script("renew")
def renew(
    *,
    calls_key: Key,
    op_key: Key,
    run_keys: list[Key],
    now_ms: int | None,
    settings: Map,
    channel: str,
    run: str,
    call: str,
    op_digest: str,
    lease_ms: int,
    usage_map: Map,
    global_claim: str,
) -> None:
    """The tool still runs; keep its claim and hear whether to stop (SPEC 2.6)."""


@script("charge")
def charge(
    *,
    calls_key: Key,
    trace_key: Key,
    run_keys: list[Key],
    now_ms: int | None,
    settings: Map,
    channel: str,
    birth_record: str,
    limits: str,
    run: str,
    op_id: str,
    usage_map: Map,
    reserve: Map,
    known_epoch: str,
) -> None:
    """Count or reserve the usage of a model call, before it is made (SPEC 2.10)."""


@script("settle")
def settle(
    *,
    calls_key: Key,
    trace_key: Key,
    run_keys: list[Key],
    now_ms: int | None,
    settings: Map,
    channel: str,
    run: str,
    op_id: str,
    usage_map: Map,
) -> None:
    """What a charge really used; its reservation is let go (SPEC 2.10)."""


@script("handoff")
def handoff(
    *,
    calls_key: Key,
    trace_key: Key,
    marks_key: Key,
    run_keys: list[Key],
    now_ms: int | None,
    settings: Map,
    channel: str,
    birth_record: str,
    limits: str,
    run: str,
    op_id: str,
    giver: str,
    receiver: str,
    state: str,
    known_epoch: str,
) -> None:
    """Control goes from one agent to another; circles are refused (SPEC 2.7)."""


@script("checkpoint")
def checkpoint(
    *,
    trace_key: Key,
    run_keys: list[Key],
    now_ms: int | None,
    settings: Map,
    channel: str,
    birth_record: str,
    limits: str,
    run: str,
    version: int,
    ref: str,
    known_epoch: str,
) -> None:
    """The last safe point of a run, for the envelope (SPEC 2.9)."""


@script("stop")
def stop(
    *,
    trace_key: Key,
    run_keys: list[Key],
    now_ms: int | None,
    settings: Map,
    channel: str,
    birth_record: str,
    limits: str,
    run: str,
    ended_by: str,
    why: str,
    note: str,
    known_epoch: str,
) -> None:
    """End a run from outside, by a kill or a finish (SPEC 2.8)."""


@script("freeze")
def freeze(
    *,
    trace_key: Key,
    run_keys: list[Key],
    now_ms: int | None,
    settings: Map,
    channel: str,
    birth_record: str,
    limits: str,
    run: str,
    scope: str,
    note: str,
    known_epoch: str,
) -> None:
    """Hold a run for a while; the scopes replace those before (SPEC 2.8)."""


@script("resume")
def resume(
    *,
    trace_key: Key,
    run_keys: list[Key],
    now_ms: int | None,
    settings: Map,
    channel: str,
    run: str,
    change: str,
    changes: Map,
    note: str,
) -> None:
    """An operator lets a run go on after a named change (SPEC 2.8)."""


@script("resolve")
def resolve(
    *,
    op_key: Key,
    now_ms: int | None,
    settings: Map,
    state: str,
    names: Map,
    key: str,
    value: str,
    value_map: Map,
    operation_id: str,
    note: str,
    channel: str,
) -> None:
    """An operator looked at the outside system and says what is true (SPEC 2.6)."""


@script("look")
def look(
    *,
    op_key: Key,
    now_ms: int | None,
    wait_ms: int | None,
    channel: str,
) -> None:
    """What a ledger record says now; a lease that is over puts it in doubt (SPEC 2.6)."""


@script("claim")
def claim(
    *,
    op_key: Key,
    now_ms: int | None,
    lease_ms: int,
    owner: str,
    fp: str,
    run: str,
    agent: str,
    tool: str,
    key: str,
    reclaim: str,
) -> None:
    """Give exactly one call the right to a global effect (SPEC 2.6)."""


@script("report")
def report(
    *,
    op_key: Key,
    now_ms: int | None,
    settings: Map,
    owner: str,
    outcome: str,
    value: str,
    value_map: Map,
    operation_id: str,
    channel: str,
) -> None:
    """The owner of a global effect says what became of it (SPEC 2.6)."""


@script("extend")
def extend(
    *,
    op_key: Key,
    now_ms: int | None,
    owner: str,
    lease_ms: int,
) -> None:
    """Keep the claim of a global effect while its tool runs (SPEC 2.6)."""


@script("withdraw")
def withdraw(
    *,
    calls_key: Key,
    trace_key: Key,
    marks_key: Key,
    op_key: Key,
    run_keys: list[Key],
    now_ms: int | None,
    settings: Map,
    channel: str,
    run: str,
    call: str,
    asked: int,
) -> None:
    """Take an admission back that its caller never heard of (SPEC 2.6, 5)."""


@script("release")
def release(*, op_key: Key, now_ms: int | None, settings: Map, owner: str, channel: str) -> None:
    """Take a global claim back that its caller never heard of (SPEC 2.6, 5)."""


@script("unlist")
def unlist(*, doubt_key: Key, member: str, score: str) -> None:
    """A record that was listed is finished; it leaves the index unless it was listed anew since."""


@script("deny_rules")
def deny_rules(*, deny_key: Key) -> None:
    """The emergency rules for all runs, and what time it is (SPEC 2.8)."""


if missing := set(script_names()) - set(STUBS):
    raise ScriptError(f"no stub for {sorted(missing)}")
