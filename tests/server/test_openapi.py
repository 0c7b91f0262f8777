"""The OpenAPI document is valid, names every operation, and the daemon keeps to it whatever it is sent."""

from __future__ import annotations

import asyncio
import json
import warnings

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from openapi_spec_validator import validate
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from guardd.protocol.operations import OPERATIONS
from guardd.server.openapi import document
from tests.servers import Server
from tests.web import web

CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
EXAMPLES = 6


def test_the_document_is_valid_and_names_every_operation() -> None:
    made = document(has_clock=False)
    validate(json.loads(json.dumps(made)))
    assert {path.removeprefix("/v1/") for path, item in made["paths"].items() if "post" in item} == set(OPERATIONS)
    assert "at_ms" not in json.dumps(made)
    assert "at_ms" in json.dumps(document(has_clock=True))
    assert set(made["components"]["schemas"]["Before"]["required"]) == {"run", "call", "tool"}


async def test_the_daemon_keeps_to_its_document(embedded: Server, prefix: str) -> None:
    """A few made-up requests of every operation, as an operator: no 5xx, and every answer as it was described."""
    async with web(embedded.url, prefix) as served:
        token = await served.token("operator")
        described = (await served.http.get("/openapi.json")).json()
        del described["paths"]["/v1/events"]  # it does not end
        asked = await asyncio.to_thread(ask_all, described, served.base, token)
    assert asked >= len(OPERATIONS) * 2


def ask_all(described: dict, base: str, token: str) -> int:
    schema = schemathesis.openapi.from_dict(described)
    asked = 0
    for result in schema.get_all_operations():
        operation = result.ok()

        @given(case=operation.as_strategy())
        @settings(
            max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        def run(case: schemathesis.Case) -> None:
            nonlocal asked
            asked += 1
            case.call_and_validate(base_url=base, headers={"Authorization": f"Bearer {token}"}, checks=CHECKS)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()
    return asked
