"""What the pages about the chart tell people to run, without a cluster."""

from __future__ import annotations

import re
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

from makeway.launcher.remote import _order
from makeway_quota.store.store import open_store
from walk import PAGE, ROOT, blocks, section, steps

from kube_cluster import helm, programs


def test_the_cell_of_step_9_needs_nothing_that_a_device_plugin_sets() -> None:
    """NVIDIA's sets no CUDA_VISIBLE_DEVICES, unlike that of the tests' clusters."""
    (cell,) = (text for text in blocks(steps()[9], "python") if text.startswith("%%train"))
    (worker,) = _order({"gpus": 1.0, "step": 0, "saved_at": None}, {})["workers"]
    program = cell.partition("\n")[2]
    done = subprocess.run(
        [sys.executable, "-c", program], env=worker["env"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"GPUs of this job: 1 in the pod of {socket.gethostname()}\n"


def test_the_page_names_the_versions_that_the_tests_use_and_the_oldest_that_the_chart_accepts() -> None:
    rows = dict(re.findall(r"^\| (Kubernetes|Helm) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    chart = (ROOT / "helm" / "makeway" / "Chart.yaml").read_text(encoding="utf-8")
    (oldest,) = re.findall(r'^kubeVersion: ">=(\d+\.\d+)\.0-0"$', chart, re.MULTILINE)
    tested, needed = (version.rpartition(".")[0] for version in (programs.KUBERNETES, helm.VERSION))
    assert rows["Kubernetes"].startswith(f"{tested} with containerd and kube-proxy")
    assert f"{oldest} is the oldest version that the chart accepts" in rows["Kubernetes"]
    assert f"You need Kubernetes {oldest} or newer" in section("Ten steps")
    assert rows["Helm"] == needed


def test_the_backup_of_a_cluster_copies_the_database_of_a_service_that_runs(tmp_path: Path) -> None:
    commands = blocks(section("On a cluster", ROOT / "docs" / "how-to" / "back-up-and-upgrade.md"), "sh")[0]
    (program,) = re.findall(r"^backup='(.*)'$", commands, re.MULTILINE)
    store = open_store(f"sqlite:///{tmp_path / 'makeway.sqlite'}")
    files = [tmp_path / "makeway.sqlite", tmp_path / "backup.sqlite"]
    try:
        subprocess.run([sys.executable, "-c", program, *map(str, files)], check=True)
    finally:
        store.close()
    copies = []
    for file in files:
        with sqlite3.connect(file) as result:
            copies.append(result.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall())
        result.close()
    assert copies[0] == copies[1]
    assert len(copies[0]) > 10
