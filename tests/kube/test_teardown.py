"""A cluster leaves nothing behind: after Ctrl-C, after its owner was killed, and after its guard was killed, too."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from leftovers import left
from pods import wait_until

from kube_cluster.api import Api
from kube_cluster.cluster import Cluster, why_no_node
from kube_cluster.folder import Folder
from kube_cluster.processes import ends, kill_marked, marked, start

pytestmark = pytest.mark.kube

LARGE = """
import mmap, threading, time
memory = mmap.mmap(-1, 2**27)
memory.write(bytes(range(256)) * 2**19)
for _ in range(20):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("up", flush=True)
time.sleep(600)
"""
"""A process that takes a while to end: its memory is released before its files, mounts and control group are."""

ROOT = Path(__file__).parents[2]
READY = "Ctrl-C removes the cluster.\n"
COMMAND = [sys.executable, "-m", "kube_cluster"]


class Running:
    """A cluster that a command of its own keeps."""

    def __init__(self, command: subprocess.Popen[str], folder: Folder, kubeconfig: Path) -> None:
        self.command = command
        self.folder = folder
        self.kubeconfig = kubeconfig
        self._facts = folder.facts()

    def guard(self) -> psutil.Process:
        """Return the process that waits for the end of the command."""
        (result,) = [
            one for one in psutil.Process(self.command.pid).children() if "kube_cluster.teardown" in one.cmdline()
        ]
        return result

    def left(self) -> list[str]:
        """Return what is there of the cluster."""
        return left(self.folder, self._facts)


@contextmanager
def running(gpus: int) -> Iterator[Running]:
    """Start a cluster by the command and yield it when it is ready."""
    command = subprocess.Popen(
        [*COMMAND, "up", "--gpus", str(gpus)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with command:
        try:
            assert command.stdout
            message = ""
            for line in command.stdout:
                message += line
                if line == READY:
                    break
            result = re.search(r"export KUBECONFIG=(\S+)", message)
            assert result, message
            kubeconfig = Path(result[1])
            yield Running(command, Folder(kubeconfig.parent), kubeconfig)
        finally:
            command.kill()


@pytest.fixture
def cluster() -> Iterator[Running]:
    """Return a cluster of its own, with a real node where this machine can run one."""
    with running(gpus=0 if why_no_node() else 2) as result:
        assert len(result.left()) > 4
        assert result.folder.owner_lives()
        yield result


def run(*words: str) -> str:
    """Run a command on the clusters and return what it says."""
    done = subprocess.run([*COMMAND, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_ctrl_c_leaves_nothing(cluster: Running) -> None:
    cluster.command.send_signal(signal.SIGINT)
    assert cluster.command.wait(60) == 130
    assert cluster.left() == []


def test_a_killed_owner_leaves_nothing(cluster: Running) -> None:
    cluster.command.kill()
    cluster.command.wait(60)
    wait_until(lambda: not cluster.left(), "the guard has removed the cluster")


def test_what_a_killed_guard_leaves_is_removed_by_the_next_command(cluster: Running) -> None:
    cluster.guard().kill()
    cluster.command.kill()
    cluster.command.wait(60)
    assert cluster.left()
    assert not cluster.folder.owner_lives()
    assert cluster.folder.name in run("down")
    assert cluster.left() == []


def test_two_clusters_run_side_by_side_and_one_is_removed_by_its_name(control_plane: Cluster) -> None:
    with running(gpus=0) as other:
        api = Api(other.kubeconfig)
        assert api.ready()
        api.close()
        first, second = (json.loads(one.read_text()) for one in (control_plane.kubeconfig, other.kubeconfig))
        assert first["clusters"][0]["cluster"]["server"] != second["clusters"][0]["cluster"]["server"]
        listed = run("list")
        assert all(f"{one.folder.name}  running" in listed for one in (control_plane, other))
        assert "Removed" in run("down", other.folder.name)
        assert other.left() == []
    assert control_plane.api.ready()


def test_a_name_that_no_cluster_has_is_refused_in_words() -> None:
    assert "There is no cluster nothing" in run("down", "nothing")


def test_processes_that_were_killed_have_ended(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "cluster")
    folder.logs.mkdir(parents=True)
    four = f"import subprocess, sys, time\nfor _ in range(4): subprocess.Popen([sys.executable, '-c', {LARGE!r}])\n"
    start(folder, "large", [sys.executable, "-c", f"{four}time.sleep(600)"])
    log = folder.logs / "large.log"
    wait_until(lambda: log.read_text().count("up") == 4, "all of them run")
    pids = marked(folder)
    assert len(pids) == 5
    kill_marked(folder)
    assert [pid for pid in pids if ends(pid)] == []
