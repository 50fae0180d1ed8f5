"""`make test` runs the tests on Kubernetes beside the others, or after a build that ends in time or in an error."""

from __future__ import annotations

import gc
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import run_tests
import strict_runs
from run_tests import Build, BuildProblem, Tiers

TESTS = Path(__file__).parents[1]
PYTEST_INI = f"[pytest]\naddopts = -m 'not kube'\nmarkers =\n  kube\n  no_repeat\npythonpath = {TESTS}\n"
CONFTEST = "from strict_runs import pytest_configure, pytest_runtest_makereport\n"
PLAIN = "import os\ndef test_plain(): assert not os.path.exists('broken')\n"
ON_KUBERNETES = (
    "import pathlib, pytest\n@pytest.mark.kube\ndef test_kube():\n"
    "    pathlib.Path('ran').touch()\n    assert pathlib.Path('built').exists()\n"
)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project with one test without Kubernetes and one on it, which wants a file named `built`."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a start with all plugins takes seconds
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p xdist")
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "1")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    (tmp_path / "pytest.ini").write_text(PYTEST_INI)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "tests/kube").mkdir(parents=True)
    (tmp_path / "tests/test_plain.py").write_text(PLAIN)
    (tmp_path / "tests/kube/test_kube.py").write_text(ON_KUBERNETES)
    return tmp_path


def build(folder: Path, script: str, minutes: float = 1) -> Build:
    """Start a build that is this shell script."""
    return Build(["sh", "-c", f"cd {folder}; {script}"], folder / "log" / "build.log", minutes)


def test_a_build_that_fails_is_an_error_with_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(BuildProblem, match=r"status 3:\n  no such module\n.*build\.log"):
        build(tmp_path, "echo no such module; exit 3").wait()


def test_a_build_that_takes_too_long_is_ended_with_its_compilers(tmp_path: Path) -> None:
    slow = build(tmp_path, "sleep 600 & echo $! > compiler.new; mv compiler.new compiler; wait", minutes=0)
    end = time.monotonic() + 60
    while not (tmp_path / "compiler").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    with pytest.raises(BuildProblem, match=r"not built within 0 s\. What is compiled is kept: run the same command"):
        slow.wait()
    compiler = int((tmp_path / "compiler").read_text())
    while alive(compiler):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_build_gives_way_to_everything_else(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    slow = build(tmp_path, "cat go; nice; cat /proc/self/autogroup || true")
    (tmp_path / "go").write_text("")
    slow.wait()
    niceness, *session = slow.log.read_text().splitlines()
    assert niceness == "19"
    if Path("/proc/self/autogroup").exists():
        assert session[0].endswith("nice 19")


def test_what_the_build_says_is_shown_while_the_tests_wait_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(seconds: float) -> None:
        """Release the build once its first lines were shown."""
        if (tmp_path / "go").exists():
            (tmp_path / "go").write_text("20 percent\n")
            (tmp_path / "go").unlink()
        time.sleep(seconds)

    os.mkfifo(tmp_path / "go")
    slow = build(tmp_path, "echo early; echo 10 percent; cat go; sleep 1")
    while slow.log.read_text() != "early\n10 percent\n":
        time.sleep(0.02)
    monkeypatch.setattr(run_tests, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    slow.wait()
    message = capsys.readouterr().out
    assert "early" not in message
    assert "10 percent\n20 percent\nKubernetes is built: " in message


@pytest.mark.slow
def test_tests_on_kubernetes_wait_for_the_build(project: Path) -> None:
    status = run_tests.run(Tiers([], 0, project), build(project, "sleep 2; touch built"))
    assert status == 0
    assert (project / "ran").exists()


@pytest.mark.slow
def test_tests_on_kubernetes_run_beside_the_others_and_are_shown_after_them(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "built").touch()
    waits = "import os, time\ndef test_waits():\n    while not os.path.exists('ran'): time.sleep(0.02)\n"
    (project / "tests/test_waits.py").write_text(waits)
    on_kubernetes = (project / "tests/kube/test_kube.py").read_text()
    (project / "tests/kube/test_kube.py").write_text(on_kubernetes + "def test_plain_too(): pass\n")
    assert run_tests.run(Tiers([], 0, project), None) == 0
    message = capfd.readouterr().out
    first, title, second = message.partition("\nThe tests on Kubernetes:\n")
    assert title
    assert "3 passed" in first
    assert "1 passed" in second


@pytest.mark.slow
def test_tests_on_kubernetes_do_not_run_after_a_build_that_failed(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_tests.run(Tiers([], 0, project), build(project, "exit 1")) == 1
    assert not (project / "ran").exists()
    message = capfd.readouterr()
    assert "1 passed" in message.out
    assert "The tests on Kubernetes did not run.\n" in message.err


@pytest.mark.slow
@pytest.mark.parametrize(("words", "ran"), [([], True), (["-x"], False)])
def test_a_failure_before_them_is_kept_in_the_status(project: Path, words: list[str], ran: bool) -> None:
    (project / "broken").touch()
    (project / "built").touch()
    assert run_tests.run(Tiers(words, 0, project), None) in (1, 2)
    assert (project / "ran").exists() == ran


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "selected"),
    [
        ([], True),
        (["tests/kube"], True),
        (["-k", "kube"], True),
        (["tests/test_plain.py"], False),
        (["-k", "plain"], False),
        (["-m", "kube"], False),
    ],
)
def test_the_arguments_select_tests_on_kubernetes_or_not(project: Path, words: list[str], selected: bool) -> None:
    assert Tiers(words, 0, project).has_second() == selected


FLAKY = (
    "import os, pathlib, pytest\n"
    "@pytest.mark.xdist_group('some')\n"
    "def test_flaky():\n"
    "    alone = os.environ['PYTEST_XDIST_WORKER_COUNT'] == '1'\n"
    "    with open('runs', 'a') as runs: runs.write('alone\\n' if alone else 'beside others\\n')\n"
    "    assert alone or not pathlib.Path('busy').exists()\n"
)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_what_fails_beside_other_tests_runs_again_alone(
    project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "2")
    (project / "tests/test_flaky.py").write_text(FLAKY)
    (project / "tests/test_others.py").write_text("def test_other(): open('others', 'a').write('ran\\n')\n")
    (project / "busy").touch()
    if broken:
        (project / "broken").touch()
    words = ["tests/test_flaky.py", "tests/test_plain.py", "tests/test_others.py"]
    assert run_tests.run(Tiers(words, 0, project), None) == broken
    assert (project / "runs").read_text() == "beside others\nalone\n"
    assert (project / "others").read_text() == "ran\n"
    flaky = "Flaky: failed beside other tests and passed alone:\n  tests/test_flaky.py::test_flaky\n"
    assert (flaky in capfd.readouterr().out) != broken
    (project / "busy").unlink()
    (project / "broken").unlink(missing_ok=True)
    assert run_tests.run(Tiers(words, 0, project), None) == 0
    assert (project / "runs").read_text() == "beside others\nalone\nbeside others\n"


@pytest.mark.slow
def test_the_first_failure_of_a_marked_test_counts(
    project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are still repeated; a fixture that fails says nothing of what the test proves."""
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "2")
    marked = FLAKY.replace("@pytest", "@pytest.mark.no_repeat\n@pytest", 1).replace("runs'", "safe runs'")
    (project / "tests/test_safe.py").write_text(marked.replace("test_flaky", "test_safe"))
    (project / "tests/test_flaky.py").write_text(FLAKY)
    (project / "busy").touch()
    words = ["tests/test_flaky.py", "tests/test_safe.py"]
    assert run_tests.run(Tiers(words, 0, project), None) == 1
    assert (project / "runs").read_text() == "beside others\nalone\n"
    assert (project / "safe runs").read_text() == "beside others\n"
    message = capfd.readouterr().out
    assert "Flaky: failed beside other tests and passed alone:\n  tests/test_flaky.py::test_flaky\n" in message
    assert message.endswith("already the first failure counts:\n  tests/test_safe.py::test_safe\n")
    in_fixture = marked.replace("def test_flaky():", "@pytest.fixture\ndef ready():")
    in_fixture = in_fixture.replace("@pytest.mark.no_repeat\n@pytest.mark.xdist_group('some')\n", "")
    (project / "tests/test_safe.py").write_text(in_fixture + "@pytest.mark.no_repeat\ndef test_safe(ready): pass\n")
    assert run_tests.run(Tiers(["tests/test_safe.py"], 0, project), None) == 0
    assert "  tests/test_safe.py::test_safe\n" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("late", ["TimeoutError('in vain')", "subprocess.TimeoutExpired('sleep', 9)"])
def test_a_marked_test_that_waited_in_vain_runs_again(
    project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "2")
    waits = FLAKY.replace("@pytest", "@pytest.mark.no_repeat\n@pytest", 1).replace("import os", "import os, subprocess")
    busy = "    if not alone and pathlib.Path('busy').exists(): raise {}\n"
    (project / "tests/test_waits.py").write_text(waits[: waits.index("    assert")] + busy.format(late))
    (project / "busy").touch()
    assert run_tests.run(Tiers(["tests/test_waits.py"], 0, project), None) == 0
    assert (project / "runs").read_text() == "beside others\nalone\n"
    assert "Flaky: failed beside other tests and passed alone:" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("name", "test"),
    [
        ("tests/test_a.py::test_x@tests/test_a.py", "tests/test_a.py::test_x"),
        ("tests/test_a.py::test_x[a@b]@some", "tests/test_a.py::test_x[a@b]"),
        ("tests/test_a.py::test_x[a@b]@tests/test_a.py::test_x[a@b]", "tests/test_a.py::test_x[a@b]"),
        ("tests/test_a.py::test_x[a@b]", "tests/test_a.py::test_x[a@b]"),
        ("tests/test_a.py::test_x", "tests/test_a.py::test_x"),
    ],
)
def test_a_test_is_named_without_its_group(name: str, test: str) -> None:
    assert run_tests.without_group(name) == test


def test_no_garbage_is_collected_while_a_failure_is_shown() -> None:
    report = pytest.TestReport("test", ("file", 1, "test"), {}, "failed", "its traceback", "call")
    shown = strict_runs.pytest_runtest_makereport(pytest.CallInfo.from_call(lambda: None, "call"))
    next(shown)
    assert not gc.isenabled()
    with pytest.raises(StopIteration):
        shown.send(report)
    assert gc.isenabled()


@pytest.mark.slow
@pytest.mark.parametrize(
    "skips",
    [
        "@pytest.mark.skipif(True, reason='no node here')\ndef test_it(): pass\n",
        "@pytest.fixture(scope='session')\ndef node(): pytest.skip('no node here')\ndef test_it(node): pass\n",
    ],
)
def test_nothing_is_skipped_in_ci(
    project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, skips: str
) -> None:
    (project / "tests/test_skips.py").write_text(f"import pytest\n{skips}")
    monkeypatch.delenv("CI", raising=False)
    assert run_tests.run(Tiers(["tests/test_skips.py"], 0, project), None) == 0
    assert "1 skipped" in capfd.readouterr().out
    monkeypatch.setenv("CI", "true")
    assert run_tests.run(Tiers(["tests/test_skips.py"], 0, project), None) == 1
    assert "no node here (With CI set, nothing is skipped.)" in capfd.readouterr().out


@pytest.mark.slow
def test_many_failures_are_no_accident_and_do_not_run_again(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    numbers = range(run_tests.REPEATED + 1)
    many = f"import pytest\n@pytest.mark.parametrize('n', {numbers})\ndef test_many(n): assert False\n"
    (project / "tests/test_many.py").write_text(many)
    assert run_tests.run(Tiers(["--tb=no", "tests/test_many.py"], 0, project), None) == 1
    assert "Running again" not in capfd.readouterr().out


@pytest.mark.slow
def test_a_failure_on_kubernetes_is_the_status_of_all(project: Path) -> None:
    assert run_tests.run(Tiers(["-k", "kube"], 0, project), None) == 1
    (project / "built").touch()
    assert run_tests.run(Tiers(["-k", "kube"], 0, project), None) == 0


def test_every_test_on_kubernetes_is_in_the_folder_that_the_second_tier_runs(root: Path, tracked: list[Path]) -> None:
    tests = [file.relative_to(root) for file in tracked if file.match("test_*.py") and file.name != Path(__file__).name]
    mark = re.compile(r"^(@|pytestmark = .*)pytest\.mark\.kube\b", re.MULTILINE)
    marked = {file for file in tests if mark.search((root / file).read_text(encoding="utf-8"))}
    assert marked
    assert [file for file in marked if not file.is_relative_to("tests/kube")] == []
