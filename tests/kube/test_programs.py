"""The programs are found where they are, else built once, whatever interrupts or repeats the build."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kube_cluster import karpenter, programs
from kube_cluster.problems import KubeProblem

ROOT = Path(__file__).parents[2]
FAKE_GO = """#!/bin/sh
echo "$@" >> "$FAKE_LOG"
case "$1" in
  version) echo "go version go${FAKE_VERSION:-1.26.4} linux/amd64" ;;
  mod) [ -z "$FAKE_OFFLINE" ] || { echo "dial tcp: no such host" >&2; exit 1; } ;;
  list) printf 'a\\nb\\n' ;;
  build)
    mkdir -p "$GOCACHE"
    [ -z "$FAKE_BROKEN" ] || { echo "./main.go:1: syntax error" >&2; exit 1; }
    while [ -n "$FAKE_WAIT" ] && [ -e "$FAKE_WAIT" ]; do sleep 0.05; done
    while [ "$1" != -o ]; do shift; done
    echo a >&2
    echo "$2" > "$2" ;;
esac
"""


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the log of a Go on PATH that compiles at once."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "go").write_text(FAKE_GO)
    (folder / "go").chmod(0o755)
    log = tmp_path / "calls"
    log.touch()
    for tool in ("mkdir", "sleep"):
        (folder / tool).symlink_to(f"/bin/{tool}")
    monkeypatch.setenv("PATH", str(folder))  # alone: a real Go behind it would compile Kubernetes
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FAKE_LOG", str(log))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    monkeypatch.setattr(programs, "NEEDED_GIB", 0)
    monkeypatch.setattr(programs, "GO_FROM_PYPI", tmp_path / "none")
    return log


@pytest.fixture
def compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file: Go compiles for as long as it is there."""
    file = tmp_path / "compiling"
    file.touch()
    monkeypatch.setenv("FAKE_WAIT", str(file))
    return file


def builds(log: Path) -> int:
    """Return how many compilers of the whole ran."""
    return len([line for line in log.read_text().splitlines() if line.startswith("build") and line.endswith("kube .")])


def builder() -> subprocess.Popen[str]:
    """Start a process that builds."""
    code = "from kube_cluster import programs; programs.NEEDED_GIB = 0; print(programs.built())"
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def wait_for(log: Path, count: int) -> None:
    end = time.monotonic() + 60
    while builds(log) < count:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_they_are_built_once(go: Path) -> None:
    place = programs.built()
    assert place.parent == programs.cache()
    assert (place / "kubectl").resolve() == place / "kube"
    assert programs.control_plane()["etcd"] == place / "etcd"
    assert builds(go) == 1
    assert sorted(file.name for file in programs.cache().iterdir()) == sorted([place.name, "lock"])


def test_other_sources_are_another_build(go: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = programs.built()
    monkeypatch.setattr(programs, "FLAGS", (*programs.FLAGS, "-race"))
    assert programs.built() != first
    assert first.exists()
    assert builds(go) == 2


def test_karpenter_is_built_once_from_the_version_with_a_checksum_that_is_named(go: Path) -> None:
    program = karpenter.karpenter()
    assert karpenter.karpenter() == program
    calls = [line for line in go.read_text().splitlines() if line.startswith("build")]
    assert [line.endswith(f"/karpenter.new/karpenter {karpenter.MODULE}/kwok") for line in calls] == [True]
    assert sorted(file.name for file in programs.cache().iterdir()) == sorted(["go-build", program.parent.name, "lock"])
    module, sums = ((karpenter.SOURCES / name).read_text() for name in ("go.mod", "go.sum"))
    assert f"{karpenter.MODULE} v{karpenter.VERSION}\n" in module
    assert f"\n{karpenter.MODULE} v{karpenter.VERSION} h1:" in sums


def test_two_builders_at_once_build_once(go: Path, compiling: Path) -> None:
    with builder() as first:
        wait_for(go, 1)
        with builder() as second:
            compiling.unlink()
            places = {one.communicate(timeout=60)[0].strip() for one in (first, second)}
    assert len(places) == 1
    assert builds(go) == 1


def test_a_killed_builder_leaves_no_half_of_a_build(go: Path, compiling: Path) -> None:
    with builder() as first:
        wait_for(go, 1)
        os.kill(first.pid, signal.SIGKILL)
    assert not (programs.cache() / programs.key()).exists()
    compiling.unlink()
    place = programs.built()
    assert (place / "kube").exists()
    assert not list(programs.cache().glob("*.new"))
    assert builds(go) == 2


def test_programs_of_kubebuilder_come_first_but_only_as_a_whole_set(
    go: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assets = tmp_path / "assets"
    assets.mkdir()
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(assets))
    for name in programs.CONTROL_PLANE[:-1]:
        (assets / name).write_text("#!/bin/sh\n")
        (assets / name).chmod(0o755)
    assert programs.control_plane()["etcd"] == programs.built() / "etcd"
    (assets / programs.CONTROL_PLANE[-1]).symlink_to("etcd")
    assert programs.control_plane()["etcd"] == assets / "etcd"
    assert programs.kubectl() == programs.built() / "kubectl"
    assert builds(go) == 1


@pytest.mark.usefixtures("go")
@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("FAKE_VERSION", "1.19", "go is 1.19"),
        ("FAKE_OFFLINE", "1", "connect this machine to the network"),
        ("FAKE_BROKEN", "1", "syntax error"),
    ],
)
def test_what_is_missing_is_said_in_words(
    variable: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(KubeProblem, match=words):
        programs.built()
    assert not (programs.cache() / programs.key()).exists()


def test_the_go_of_set_up_is_taken_where_the_path_has_none(go: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = go.parent / "bin"
    monkeypatch.setenv("PATH", str(go.parent))
    monkeypatch.setattr(programs, "GO_FROM_PYPI", own)
    assert programs.find_go() == own / "go"


@pytest.mark.usefixtures("go")
def test_a_full_disk_is_named_before_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "NEEDED_GIB", 2**40)
    with pytest.raises(KubeProblem, match="GiB are free"):
        programs.built()
