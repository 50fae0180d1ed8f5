"""Group tests for pytest-xdist, skip those that need root, and place pictures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from longest_first import LongestFirst, in_order
from quick_databases import copied_tables, no_flushes
from strict_runs import pytest_configure as pytest_configure
from strict_runs import pytest_runtest_makereport as pytest_runtest_makereport

ROOT = Path(__file__).parents[1]
MAX_WORKERS = 8
INSTALLED = "tests/kube/portal"
IMAGES = "images"
UNCLOSED = "ignore:unclosed transport:ResourceWarning"
"""httpx2 leaves a connection to Python's collector that is given up during its TLS handshake, as to an API server that
does not answer in time."""
PORTALS = ("portal", "fresh")
"""The fixtures that start a whole portal, with ports and a state directory of its own."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", type=Path, default=None, help="write the README's pictures into this folder")
    parser.addoption("--z2jh", type=Path, default=None, help="the folder of Zero to JupyterHub's chart, for its tests")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--z2jh") is None:
        left_out = [item for item in items if item.get_closest_marker("z2jh")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    groups = []
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        groups.append(group(item, marks))
        item.add_marker(pytest.mark.xdist_group(groups[-1]))
        if "kube" in marks:
            item.add_marker(pytest.mark.filterwarnings(UNCLOSED))
        if "root" in marks and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="system users mode needs root: run `sudo make test`"))
    items[:] = in_order(items, groups)


def group(item: pytest.Item, marks: set[str]) -> str:
    """Return the group of a test; a group stays on one worker, so that its fixtures are set up once.

    Tests that create Unix accounts form one group, because the accounts' names are the same everywhere. Of the other
    tests with whole portals, those that share one form a group, and those with one of their own run anywhere, as do
    slow tests that share nothing. Each worker has one Kubernetes cluster; the tests of the portal that the chart
    installs stay together, and so do others that need its images, which take a while to import. A mark
    `xdist_group` goes first.
    """
    if "root" in marks:
        return "accounts"
    fixtures = item._fixtureinfo.name2fixturedefs
    if "kube" in marks:
        file = item.path.relative_to(ROOT).as_posix()
        if "images" not in fixtures:
            return file
        return INSTALLED if file.startswith(INSTALLED) else IMAGES
    if named := item.get_closest_marker("xdist_group"):
        return str(named.args[0])
    portal = next((fixtures[name][-1] for name in PORTALS if name in fixtures), None)
    if portal is not None and marks & {"e2e", "browser"}:
        return item.nodeid if portal.scope == "function" else portal.baseid
    shared = any(result[-1].scope in ("module", "package") for result in fixtures.values())
    return item.nodeid if marks & {"slow", "e2e"} and not shared else item.path.relative_to(ROOT).as_posix()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LongestFirst | None:
    """Return the scheduler for `--dist loadgroup`, None for the others."""
    return LongestFirst(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return two workers more than processors for `-n auto`, as many tests wait; `-n logical` is one for each."""
    if config.option.numprocesses != "auto":
        return None
    return min(len(os.sched_getaffinity(0)) + 2, MAX_WORKERS)


@pytest.fixture(scope="session", autouse=True)
def copied_databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Spare the tests the migrations of each new SQLite file."""
    with copied_tables(tmp_path_factory.mktemp("migrated")):
        yield


@pytest.fixture(scope="session", autouse=True)
def unflushed_databases() -> Iterator[None]:
    """Spare the tests what SQLite waits for the disk."""
    with no_flushes():
        yield


@pytest.fixture(scope="session")
def pictures(request: pytest.FixtureRequest) -> Path | None:
    """Return the folder of `--screenshots`, None without the option."""
    folder = request.config.getoption("--screenshots")
    return Path(folder) if folder else None
