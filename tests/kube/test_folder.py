"""A cluster's folder tells whether its owner lives, and finds the processes and mounts of the cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from io import BytesIO, StringIO
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from kube_cluster import cgroups, commands, images, network, node, processes, teardown
from kube_cluster import folder as folder_module
from kube_cluster.cluster import why_no_node
from kube_cluster.folder import Folder, folders, registry
from kube_cluster.problems import KubeProblem
from kube_cluster.progress import Progress

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(folder_module, "MAX_PATH", 200)


def test_a_folder_knows_when_its_owner_has_ended(tmp_path: Path) -> None:
    code = (
        f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\n"
        "from kube_cluster import folder; folder.MAX_PATH = 200\n"
        "made = folder.Folder.create(); print(made.path, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout
        result = Folder(Path(owner.stdout.readline().strip()))
        assert result.owner_lives()
        assert teardown.remove_abandoned() == []
        owner.kill()
        owner.wait()
        assert not result.owner_lives()
    assert teardown.remove_abandoned() == [result.name]
    assert folders() == []


def test_every_process_of_a_cluster_is_found_and_ended() -> None:
    made = Folder.create()
    child = processes.start(made, "sleeper", ["sh", "-c", "sleep 600 & sleep 600 & wait"])
    processes.wait_until(lambda: len(processes.marked(made)) == 3, "Three processes", 30)
    teardown.remove(made)
    assert child.returncode == -9
    assert not made.path.exists()
    assert os.listdir(registry()) == ["registry.lock"]
    teardown.remove(made)
    made.disown()


def test_a_program_that_ends_is_named_with_its_last_lines() -> None:
    made = Folder.create()
    child = processes.start(made, "broken", ["sh", "-c", "echo no such flag; exit 3"])
    child.wait()
    with pytest.raises(KubeProblem, match=r"broken ended with status 3.*\n  no such flag"):
        processes.check(made)
    with pytest.raises(KubeProblem, match="The thing was not ready after 0 s"):
        processes.wait_until(lambda: False, "The thing", 0)
    teardown.remove(made)
    made.disown()


def test_facts_are_kept() -> None:
    made = Folder.create()
    assert made.facts() == {}
    made.record(network=3)
    made.record(cgroups=["/x"])
    assert Folder(made.path).facts() == {"network": 3, "cgroups": ["/x"]}
    made.disown()


def test_a_registry_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"makeway-kube-{os.getuid()}").symlink_to("/tmp")
    with pytest.raises(KubeProblem, match="not a private folder"):
        registry()


def test_a_path_that_is_too_long_for_sockets_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "MAX_PATH", 5)
    with pytest.raises(KubeProblem, match="set TMPDIR to a shorter one"):
        registry()


def test_networks_of_clusters_do_not_overlap() -> None:
    result = [network.Network(number) for number in range(network.MAX_CLUSTERS)]
    nets = [net for one in result for net in (one.nodes, one.pods)]
    assert not [pair for at, pair in enumerate(nets) for other in nets[:at] if pair.overlaps(other)]
    assert result[3].pods_of(2) == IPv4Network("10.131.2.0/24")
    assert all(len(one.port(99)) <= 15 for one in result), "a longer name is no name of a device"


@pytest.mark.root
@pytest.mark.skipif(why_no_node() is not None, reason=str(why_no_node()))
def test_a_killed_cluster_leaves_the_network_of_the_next_one_alone() -> None:
    first, second = Folder.create(), Folder.create()
    theirs = network.create(first)
    network.remove(theirs)  # and its owner and guard were killed, so that the folder still has the number
    ours = network.create(second)
    try:
        assert ours == theirs
        teardown.remove(first)
        assert (Path("/sys/class/net") / ours.bridge).exists()
    finally:
        teardown.remove(second)
        first.disown()
        second.disown()
    assert not (Path("/sys/class/net") / ours.bridge).exists()


def test_a_node_without_root_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(KubeProblem, match=r"^A real node needs root[^\n]*$"):
        node.check_machine()


def test_a_node_without_control_groups_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "NEEDED", ("cpu", "made-up"))
    with pytest.raises(KubeProblem, match=r"^A real node needs cgroup v1[^\n]*made-up[^\n]*$"):
        cgroups.plan("x")


def test_a_container_without_capabilities_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(node, "effective_capabilities", lambda: 1 << 12)
    with pytest.raises(KubeProblem, match=r"^A real node needs capabilities [^\n]*: CAP_SYS_ADMIN\.$"):
        node.check_machine()


def test_missing_packages_are_named() -> None:
    packages = {"one": ("sh",), "two": ("/no/such", "none-such"), "three": ("none-such", "/dev/null")}
    assert commands.missing_packages(packages) == ["two"]


def test_an_image_depends_on_its_contents_alone() -> None:
    assert images.host() == images.host()
    with tarfile.open(fileobj=BytesIO(images.host())) as tar:
        names = tar.getnames()
    assert names[:2] == ["oci-layout", "index.json"]
    assert len(names) == 5


def test_progress_on_a_terminal_is_a_bar_that_fits_on_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    out = StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    progress = Progress("Compiling " + "a long title " * 9, out)
    progress.show(2, 4)
    progress.show(4, 4)
    progress.end()
    title, bars, end = out.getvalue().rpartition("\r")[0], out.getvalue().split("\r")[1:-1], out.getvalue()[-20:]
    assert title.startswith("Compiling ")
    assert [len(bar) < 80 for bar in bars] == [True, True]
    assert "█" * 15 + "░" * 15 + "  50%" in bars[0]
    assert end.endswith("done after 0 s\n")


def test_progress_without_a_terminal_is_a_line_for_the_start_and_the_end() -> None:
    out = StringIO()
    progress = Progress("Compiling", out)
    for done in range(5):
        progress.show(done, 4)
    progress.end()
    assert out.getvalue() == "Compiling: 0% after 0 s\nCompiling: done after 0 s\n"
