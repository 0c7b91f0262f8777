"""No worker process outlives its test, whatever became of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fault import storm


@pytest.fixture(autouse=True)
def workers_end() -> Iterator[None]:
    """Ends what a failed test left."""
    yield
    storm.end_all()
