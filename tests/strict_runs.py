"""Make runs strict: nothing is skipped in CI, and the runner learns of the first failures that count."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Generator
from typing import cast

import pytest

FIRST_FAILURES = "makeway/first_failures"
"""The name in pytest's cache that scripts/run_tests.py reads."""
MARK = "no_repeat"
LATE = (TimeoutError, subprocess.TimeoutExpired)
"""What a test raises that has waited in vain: what it waited for may come where it has the machine for itself."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In continuous integration, turn a skip into a failure with its reason: a skip would go unnoticed there.

    No garbage is collected meanwhile: a finalizer that prints a traceback breaks Python 3.11's `ast.parse` on the way
    (CPython's issue 106905), and pytest, which shows a failure with it, would end the whole run.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        report = yield
    finally:
        if collects:
            gc.enable()
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        file, line, reason = cast("tuple[str, int, str]", report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"{file}:{line}: {reason.removeprefix('Skipped: ')} (With CI set, nothing is skipped.)"
    if call.excinfo is not None and issubclass(call.excinfo.type, LATE):
        report.late = True  # pytest-xdist carries it to the process that sees all results
    return report


class FirstFailures:
    """Keeps the names of the tests marked `no_repeat` that failed; it sees the tests of all workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember a test whose own part failed with a result.

        What its fixtures could not set up says nothing of what it proves, and nor does a wait that it gave up: on a
        busy machine that is no proof that something was lost or came twice. Such tests run again, as all others.
        """
        late = getattr(report, "late", False)
        if report.failed and report.when == "call" and MARK in report.keywords and not late:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write the names, also where there are none."""
        cache = getattr(self._config, "cache", None)  # not there with `-p no:cacheprovider`
        if cache is not None:
            cache.set(FIRST_FAILURES, sorted(self._failed))


def pytest_configure(config: pytest.Config) -> None:
    """Watch the results, except on a worker of pytest-xdist, which sees only its own."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FirstFailures(config))
