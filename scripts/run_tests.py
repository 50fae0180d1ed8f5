"""Runs every test in two tiers: those without Kubernetes, and those on a cluster.

The tiers run side by side, as the tests on a cluster wait half of their time. Where the programs of Kubernetes are not
built yet, they are built beside the first tier, and the second one follows.

Tests that fail run again, alone, when both tiers have ended: one that passes then is named as flaky and does not fail
the run, as in the tests of Kubernetes. Thousands of tests with real processes share the processors here, and each may
meet a moment in which the machine stands still. The first failure of a test with the mark `no_repeat` counts: those
prove what may not fail even once, such as that nothing starts twice. Where such a test only waited in vain, it runs
again as well.

Run by `make test` with the environment's Python. The build happens once; its limit counts from its start.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import set_up

sys.path.insert(0, str(set_up.ROOT))

from kube_cluster import helm, processes, programs
from kube_cluster.progress import duration

ROOT = set_up.ROOT
NO_TESTS = 5
"""What pytest returns when no test was selected."""
FAILED = 1
LIMIT_MINUTES = 60.0
PAUSE = 0.2
REPEATED = 100
"""The most tests that run again, among them all that share a cluster; where more fail, it is no accident."""
LAST_FAILED = "v/cache/lastfailed"
FIRST_FAILURES = "v/makeway/first_failures"
"""What pytest's cache has of the tests that failed, and of those among them with the mark: tests/strict_runs.py."""
BUILD = (sys.executable, "-m", "kube_cluster", "build")
LOWEST_PRIORITY = 19
"""The niceness of what runs when nothing else wants to."""


class BuildProblem(Exception):
    """The programs of Kubernetes are not there; the sentence says why and what to do."""


class Build:
    """The build of Kubernetes in the background: it gives way to the tests, and ends with them."""

    def __init__(self, command: Sequence[str], log: Path, minutes: float) -> None:
        self.log = log
        self._minutes = minutes
        self._start = time.monotonic()
        log.parent.mkdir(exist_ok=True)
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                ["nice", "-n", str(LOWEST_PRIORITY), *command],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # ended as one
            )
        # Desktop kernels weigh niceness within a session only, and sessions by a niceness of their own.
        with suppress(OSError):
            Path(f"/proc/{self._process.pid}/autogroup").write_text(f"{LOWEST_PRIORITY}", encoding="utf-8")

    def wait(self) -> None:
        """Return when the programs are built, showing what the build says; raise BuildProblem when they cannot be."""
        shown = len(self._lines()[:-1])
        while (status := self._process.poll()) is None:
            lines = self._lines()
            if len(lines) > shown:
                print("\n".join(lines[shown:]), flush=True)
                shown = len(lines)
            if time.monotonic() - self._start > self._minutes * 60:
                self.stop()
                raise BuildProblem(
                    f"Kubernetes was not built within {duration(self._minutes * 60)}. What is compiled is kept: run "
                    f"the same command again to go on, or set BUILD_MINUTES to a longer time.\n{self._end()}"
                )
            time.sleep(PAUSE)
        if status:
            raise BuildProblem(f"The build of Kubernetes ended with status {status}:\n{self._end()}")
        print(f"Kubernetes is built: {duration(time.monotonic() - self._start)} since the start.", flush=True)

    def stop(self) -> None:
        """End the build with its compilers; what is compiled stays in the cache."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _lines(self) -> list[str]:
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()

    def _end(self) -> str:
        return f"{processes.last_lines(self.log)}\n  (all of it is in {self.log})"


def names_in(file: Path) -> set[str]:
    """Return the names of tests that a file of pytest's cache has; none without the file."""
    try:
        return set(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return set()


def without_group(name: str) -> str:
    """Return a test's name without the group that pytest-xdist adds to it, which may be the name again."""
    half = len(name) // 2
    if name[half:] == f"@{name[:half]}":
        return name[:half]
    return name.rpartition("@")[0] if name.rfind("@") > name.rfind("]") else name


def show(title: str, tests: Sequence[str]) -> None:
    """Print the names of tests, one a line."""
    print(f"\n{title}", *map(without_group, tests), sep="\n  ", flush=True)


class Run:
    """One run of pytest: in the foreground, or with a log that is shown when its turn has come."""

    def __init__(self, command: Sequence[str], root: Path, log: Path | None = None) -> None:
        self._log = log
        self._shown = 0
        if log is None:
            self._process = subprocess.Popen(command, cwd=root)
            return
        log.parent.mkdir(exist_ok=True)
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, cwd=root, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )

    def wait(self) -> int:
        """Return pytest's status when it has ended, showing what it prints."""
        while True:
            try:
                while (status := self._ended()) is None:
                    self._show()
                self._show()
                return status
            except KeyboardInterrupt:  # pytest has it from the terminal, too, and ends in order
                continue

    def stop(self) -> None:
        """End it if it runs."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()

    def _ended(self) -> int | None:
        try:
            return self._process.wait(None if self._log is None else PAUSE)
        except subprocess.TimeoutExpired:
            return None

    def _show(self) -> None:
        if self._log is None:
            return
        with self._log.open("rb") as file:
            file.seek(self._shown)
            new = file.read()
        self._shown += len(new)
        sys.stdout.write(new.decode(errors="replace"))
        sys.stdout.flush()


class Tier:
    """The tests of one tier: how they are selected and spread, and what of them failed."""

    def __init__(self, name: str, selection: Sequence[str], spread: Sequence[str], root: Path) -> None:
        self._selection, self._spread, self._root = list(selection), list(spread), root
        self._folder = root / ".pytest_cache" / name
        self._running: list[Run] = []

    def begin(self, log: Path | None = None) -> Run:
        """Start all tests."""
        return self._run(log, *self._spread, "--cache-clear")

    def repeat(self, status: int) -> int:
        """Run again, alone, what failed in the run that ended with this status; return that of both together.

        That takes a worker, too: pytest-xdist adds the group of a test to its name, in the cache as well.
        """
        if status != FAILED:
            return status
        counting = names_in(self._folder / FIRST_FAILURES)
        failed = sorted(names_in(self._folder / LAST_FAILED) - counting)
        if 0 < len(failed) <= REPEATED:
            (self._folder / LAST_FAILED).write_text(json.dumps(dict.fromkeys(failed, True)), encoding="utf-8")
            print(f"\nRunning again, alone, what failed: {len(failed)}.", flush=True)
            alone = ("-n", "1", "--dist", "loadgroup", "--last-failed", "--last-failed-no-failures=none")
            status = self._run(None, *alone).wait()
            if status == 0:
                show("Flaky: failed beside other tests and passed alone:", failed)
        if counting:
            show("Failed, and not repeated, as already the first failure counts:", sorted(counting))
        return FAILED if counting else status

    def is_empty(self) -> bool:
        """Whether pytest selects no test."""
        command = pytest_command(*self._selection, "--collect-only")
        return subprocess.run(command, cwd=self._root, capture_output=True, check=False).returncode != 0

    def stop(self) -> None:
        """End what runs."""
        for one in self._running:
            one.stop()

    def _run(self, log: Path | None, *words: str) -> Run:
        command = pytest_command(*words, "-o", f"cache_dir={self._folder}", *self._selection)
        self._running.append(Run(command, self._root, log))
        return self._running[-1]


def pytest_command(*words: str) -> list[str]:
    """Return the command of a run of pytest."""
    return [sys.executable, "-m", "pytest", "-q", *words]


class Tiers:
    """The two tiers of tests that the arguments select."""

    def __init__(self, arguments: Sequence[str], durations: int, root: Path = ROOT) -> None:
        self.arguments = list(arguments)
        named = any((root / word.partition("::")[0]).exists() for word in arguments)
        on_kubernetes = ["-m", "kube", *([] if named else ["tests/kube"]), *arguments]
        spread = ["--dist", "loadgroup", *([f"--durations={durations}"] if durations else [])]
        self.first = Tier("first", arguments, ["-n", "auto", *spread], root)
        self.second = Tier("second", on_kubernetes, ["-n", "3", "-rs", *spread], root)
        self.log = root / ".venvs" / "kube-tests.log"

    def has_second(self) -> bool:
        """Whether the arguments select tests on Kubernetes."""
        if any(word.startswith("-m") for word in self.arguments):  # the user's own selection is one run
            return False
        return not self.arguments or not self.second.is_empty()

    @property
    def ends_at_first_failure(self) -> bool:
        """Whether the arguments end the run at its first failure."""
        return bool({"-x", "--exitfirst"} & {*self.arguments})

    def goes_on(self, status: int) -> bool:
        """Whether the second tier follows a first that ended with this status."""
        return status in (0, NO_TESTS) or (status == FAILED and not self.ends_at_first_failure)

    def stop(self) -> None:
        """End what runs."""
        self.first.stop()
        self.second.stop()


def run(tiers: Tiers, build: Build | None) -> int:
    """Run both tiers, then what failed, and return the exit status."""
    try:
        second = build is not None or tiers.has_second()
        beside = None
        if second and build is None and not tiers.ends_at_first_failure:
            print(f"The tests on Kubernetes run beside the others, and are shown after them: {tiers.log}.", flush=True)
            beside = tiers.second.begin(tiers.log)
        status, on_kubernetes = tiers.first.begin().wait(), NO_TESTS
        if second and tiers.goes_on(status):
            print("\nThe tests on Kubernetes:", flush=True)
            if build is not None:
                build.wait()
            on_kubernetes = (beside or tiers.second.begin()).wait()
        if not tiers.ends_at_first_failure:
            status, on_kubernetes = tiers.first.repeat(status), tiers.second.repeat(on_kubernetes)
        return on_kubernetes if status in (0, NO_TESTS) and on_kubernetes != NO_TESTS else status
    except BuildProblem as problem:
        print(f"make test: {problem}\nThe tests on Kubernetes did not run.", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("\nmake test: stopped.", file=sys.stderr)
        return 130
    finally:
        tiers.stop()
        if build is not None:
            build.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests and return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    ours = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="make test", description="Run every test; what follows -- is for pytest.")
    parser.add_argument("--build-minutes", type=float, default=LIMIT_MINUTES, help="the limit of the build")
    parser.add_argument("--slowest", type=int, default=0, help="how many of the slowest tests to print")
    wanted = parser.parse_args(words[:ours])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    tiers = Tiers(words[ours + 1 :], wanted.slowest)
    build = None
    if not (programs.are_built() and helm.is_built()) and tiers.has_second():
        build = Build(BUILD, ROOT / ".venvs" / "kube-build.log", wanted.build_minutes)
        print(f"Kubernetes is built beside the tests, once; what the build says is in {build.log}.", flush=True)
    return run(tiers, build)


if __name__ == "__main__":
    sys.exit(main())
