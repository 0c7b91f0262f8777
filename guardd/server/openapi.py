"""The OpenAPI document, made from the table of operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from guardd import __version__
from guardd.model.answers import Answer
from guardd.model.errors import ERRORS
from guardd.model.reasons import ACTIONS
from guardd.protocol.operations import COMMON_ERRORS, OPERATIONS, Operation
from guardd.server.front import STATUSES

_REF = "#/components/schemas/{name}"
_TEXT: dict[str, Any] = {"type": "string"}
_INT: dict[str, Any] = {"type": "integer"}
_MAP: dict[str, Any] = {"type": "object"}

_RUN_MEMBERS: dict[str, Any] = {
    "run": _TEXT, "status": _TEXT, "reason": _TEXT, "freeze": _TEXT, "policy": _TEXT, "started_ms": _INT, "last_ms": _INT,
    "labels": {"type": "object", "additionalProperties": _TEXT}, "counters": {"type": "object", "additionalProperties": _INT}, "limits": _MAP,
}  # fmt: skip
_EFFECT = {
    "key": _TEXT, "tool": _TEXT, "scope": _TEXT, "state": _TEXT, "operation_id": _TEXT, "run": _TEXT, "owner": _TEXT,
    "until_ms": _INT,
}  # fmt: skip


def _object(members: dict[str, Any], *, others: dict[str, Any] | None = None) -> dict[str, Any]:
    """All of the members are always there."""
    return {"type": "object", "properties": {**members, **(others or {})}, "required": list(members)}


def _list(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of}


RESULTS: dict[str, dict[str, Any]] = {
    "inspect": _object(
        {
            **_RUN_MEMBERS, "ended_by": _TEXT, "ended_run": _TEXT, "progress": _MAP, "epoch": _TEXT,
            "checkpoint": {"type": ["object", "null"]}, "tools": _list(_TEXT), "window": _list(_MAP), "repeats": _list(_MAP),
            "in_flight": _list(_TEXT), "operations": _list(_MAP), "handoff_path": _list(_TEXT),
        },
        others={"envelope": _MAP},
    ),
    "runs": _list(_object(_RUN_MEMBERS)),
    "trace": _list(_object({"id": _TEXT})),
    "export": _object({"format": _TEXT, "run": _TEXT, "is_whole": {"type": "boolean"}, "policy": _TEXT, "limits": _MAP, "tools": _MAP, "runs": _MAP, "entries": _list(_MAP)}),
    "ledger": _list(_object(_EFFECT)),
    "deny_rules": _list(_object({"id": _TEXT, "tool": _TEXT, "run_prefix": _TEXT, "until_ms": {"type": ["integer", "null"]}, "note": _TEXT})),
    "token_new": _object({"id": _TEXT, "token": _TEXT}),
    "token_list": _list(_object({"id": _TEXT})),
    "token_revoke": _object({"id": _TEXT, "revoked": {"type": "boolean"}}),
    "audit": _list(_MAP),
}  # fmt: skip
"""Of the operations that answer what was asked for; the others answer an `Answer`."""

ERROR = _object(
    {"error": {"enum": list(ERRORS)}, "number": _INT, "message": _TEXT, "retry": {"enum": ["never", "later", "same_id"]}},
    others={"field": _TEXT, "value": _TEXT, "limit": {}},
)  # fmt: skip


def document(*, has_clock: bool) -> dict[str, Any]:
    """The document. has_clock: this daemon takes `at_ms`."""
    types = [operation.params for operation in OPERATIONS.values()]
    _, schemas = msgspec.json.schema_components([*types, Answer], ref_template=_REF)
    for kind in types:
        if not has_clock:
            schemas[kind.__name__]["properties"].pop("at_ms")
    schemas["Before"]["properties"].pop("client")  # the header names it
    schemas["Answer"]["properties"]["action"] = {"enum": list(ACTIONS)}
    paths: dict[str, Any] = {f"/v1/{each.name}": {"post": _operation(each)} for each in OPERATIONS.values()}
    paths["/v1/runs"]["get"] = _view(
        "runs", "Recent root runs, newest first.",
        {
            "limit": {"type": "integer", "minimum": 1, "maximum": 1000}, "waiting": {"type": "boolean"}, "status": _TEXT,
            "reason": _TEXT, "label": _TEXT, "run_prefix": _TEXT,
        },
    )  # fmt: skip
    paths["/v1/runs/{run}"] = {"get": _view("inspect", "Inspect a run; a path may hold `/`.", {}, has_run=True)}
    paths["/v1/trace/{run}"] = {
        "get": _view(
            "trace", "Trace entries of a run, oldest first.",
            {"limit": {"type": "integer", "minimum": 1, "maximum": 10_000}, "after": _TEXT, "newest": {"type": "boolean"}}, has_run=True,
        )
    }  # fmt: skip
    paths["/v1/ledger"]["get"] = _view(
        "ledger", "Effects that are claimed or in doubt.",
        {"limit": {"type": "integer", "minimum": 1, "maximum": 1000}, "in_doubt": {"type": "boolean"}, "run_prefix": _TEXT},
    )  # fmt: skip
    paths["/v1/deny_rules"]["get"] = _view("deny_rules", "The emergency rules that are not over.", {})
    paths["/v1/events"] = {"get": _stream()}
    for path, media, text in (
        ("/healthz", "application/json", "The process answers."),
        ("/readyz", "application/json", "The store answers and is trusted."),
        ("/openapi.json", "application/json", "This document."),
        ("/metrics", "text/plain", "Metrics for Prometheus."),
    ):
        paths[path] = {"get": _plain(path.strip("/").replace(".", "_"), media, text)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "guardd",
            "version": __version__,
            "description": "One shared guard in front of every tool call of an AI agent.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "security": [{}, {"token": []}],
        "components": {
            "schemas": {**schemas, "Error": ERROR},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(name=name)}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _errors(names: Sequence[str], more: dict[int, str]) -> dict[str, Any]:
    """A response a status, which names its errors."""
    by_status: dict[int, list[str]] = {}
    for name in names:
        by_status.setdefault(STATUSES[name], []).append(name)
    for status, text in more.items():
        by_status.setdefault(status, []).append(text)
    return {
        str(status): {"description": ", ".join(texts), "content": _json(_ref("Error"))}
        for status, texts in sorted(by_status.items())
    }


_ALWAYS = {401: "no token, or one that is unknown, revoked or expired", 404: "nothing of that name"}


def _operation(operation: Operation) -> dict[str, Any]:
    answers = ", ".join(operation.answers)
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.text.splitlines()[0],
        "description": f"Who may ask: {operation.role}." + (f" Answers: {answers}." if answers else ""),
        "requestBody": {"required": True, "content": _json(_ref(operation.params.__name__))},
        "responses": {
            "200": {
                "description": "the answer",
                "content": _json(_ref("Answer") if operation.answers else RESULTS[operation.name]),
            },
            **_errors(
                (*COMMON_ERRORS, *operation.errors), {**_ALWAYS, 413: "body too large", 415: "the body is not JSON"}
            ),
        },
    }
    if operation.name == "before":
        described["parameters"] = [
            {
                "name": "Guardd-Client", "in": "header", "required": True,
                "description": "the client instance, the same one over resends",
                "schema": {"type": "string", "minLength": 1, "maxLength": 128, "pattern": "^[!-~]+$"},
            }
        ]  # fmt: skip
    return described


def _view(name: str, summary: str, query: dict[str, Any], *, has_run: bool = False) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {"name": each, "in": "query", "required": False, "schema": schema} for each, schema in query.items()
    ]
    if has_run:
        parameters.append({"name": "run", "in": "path", "required": True, "schema": _TEXT})
    return {
        "operationId": f"get_{name}",
        "summary": summary,
        "parameters": parameters,
        "responses": {
            "200": {"description": "what was asked for", "content": _json(RESULTS[name])},
            **_errors((*COMMON_ERRORS, *OPERATIONS[name].errors), _ALWAYS),
        },
    }


def _stream() -> dict[str, Any]:
    return {
        "operationId": "get_events",
        "summary": "Stops, freezes and resumes as server-sent events; it does not end.",
        "parameters": [{"name": "run", "in": "query", "required": False, "schema": _TEXT}],
        "responses": {
            "200": {"description": "events", "content": {"text/event-stream": {"schema": _TEXT}}},
            **_errors(COMMON_ERRORS, {401: _ALWAYS[401]}),
        },
    }


def _plain(name: str, kind: str, summary: str) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": summary,
        "security": [],
        "responses": {
            "200": {"description": "it is so", "content": {kind: {"schema": _TEXT if kind == "text/plain" else _MAP}}},
            **_errors(("not_allowed", "store_unavailable"), {}),
        },
    }
