"""The cgroups of a node are removed with what was frozen in them."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from kube_cluster import cgroups
from kube_cluster.cluster import why_no_node

pytestmark = pytest.mark.kube


@pytest.mark.skipif(bool(why_no_node()), reason=why_no_node() or "")
def test_a_process_that_is_killed_while_it_is_frozen_keeps_no_cgroup() -> None:
    group = next(one for one in cgroups.plan("makeway-test-frozen") if one.is_relative_to(cgroups.MOUNTED / "freezer"))
    pod = group / "pod"
    pod.mkdir(parents=True)
    with subprocess.Popen(["sleep", "600"]) as frozen:
        Path(pod, "cgroup.procs").write_text(str(frozen.pid))
        Path(pod, "freezer.state").write_text("FROZEN")
        frozen.send_signal(signal.SIGKILL)
        cgroups.remove(group)
    assert not group.exists()
