"""Group tests for pytest-xdist, skip those that need root, and place pictures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PORTALS = ("portal", "fresh")
"""The fixtures that start a whole portal, with ports and a state directory of its own."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", type=Path, default=None, help="write the README's pictures into this folder")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        item.add_marker(pytest.mark.xdist_group(group(item, marks)))
        if "root" in marks and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="system users mode needs root: run `sudo make test`"))


def group(item: pytest.Item, marks: set[str]) -> str:
    """Return the group of a test; a group stays on one worker, so that its fixtures are set up once.

    Tests that create Unix accounts form one group, because the accounts' names are the same everywhere. Of the other
    tests with whole portals, those that share one form a group, and those with one of their own run anywhere.
    """
    if "root" in marks:
        return "accounts"
    fixtures = item._fixtureinfo.name2fixturedefs if marks & {"e2e", "browser"} else {}
    portal = next((fixtures[name][-1] for name in PORTALS if name in fixtures), None)
    if portal is None:
        return item.path.name
    return item.nodeid if portal.scope == "function" else portal.baseid


@pytest.fixture(scope="session")
def pictures(request: pytest.FixtureRequest) -> Path | None:
    """Return the folder of `--screenshots`, None without the option."""
    folder = request.config.getoption("--screenshots")
    return Path(folder) if folder else None
