"""What the service's tests share: one PostgreSQL server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from postgres import postgres_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """Start a PostgreSQL server of our own."""
    with postgres_server() as folder:
        yield folder
