"""What all tests share: which of them must run alone, and where pictures go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Tests that start whole portals, browsers or accounts: one worker runs them, one after the other.
# All others stay together by file, so that what a module sets up is set up once.
ALONE = {"e2e", "browser", "root"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", type=Path, default=None, help="write the README's pictures into this folder")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        item.add_marker(pytest.mark.xdist_group("portal" if marks & ALONE else item.path.name))
        if "root" in marks and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="system users mode needs root: run `sudo make test`"))


@pytest.fixture(scope="session")
def pictures(request: pytest.FixtureRequest) -> Path | None:
    """Return the folder of `--screenshots`, None when nobody wants pictures."""
    folder = request.config.getoption("--screenshots")
    return Path(folder) if folder else None
