"""Fixtures of the web's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from web.portal import Portal, portal


@pytest.fixture
async def web(tmp_path: Path) -> AsyncIterator[Portal]:
    """A service with its web, in this process."""
    async with portal(tmp_path) as made:
        yield made
