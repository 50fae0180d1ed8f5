"""Provide one portal for all tests that do not break it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub.portal import Portal


@pytest.fixture(scope="session")
def portal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Portal]:
    portal = Portal(tmp_path_factory.mktemp("portal")).start()
    yield portal
    portal.stop()


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Portal]:
    """Yield a portal that the test starts, kills and restarts itself."""
    portal = Portal(tmp_path)
    yield portal
    portal.stop()
