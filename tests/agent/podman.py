"""Podman for tests: storage of its own, and images that show what is installed on this machine, without a registry."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kube_cluster import images

DEFAULT, OTHER = "makeway.test/default:1", "makeway.test/other:1"


class Podman:
    """The podman of this machine, with images whose file `/image` names them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        }
        python = Path(sys.base_prefix)
        mounted = ["/usr:/usr:ro", *([] if python.is_relative_to("/usr") else [f"{python}:{python}:ro"])]
        # What a container may have at most where this process itself may not raise its limits.
        (folder / "containers.conf").write_text(f"""
[containers]
default_ulimits = ["nofile=1024:4096", "nproc=4096:8192"]
volumes = {list(map(str, mounted))!r}
env = ["PATH={python}/bin:/usr/bin:/bin"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
""")
        (folder / "storage.conf").write_text(f"""
[storage]
driver = "vfs"
runroot = "{folder}/run"
graphroot = "{folder}/graph"
""")
        (folder / "host.tar").write_bytes(images.host())
        self("load", "--input", str(folder / "host.tar"))
        for name in (DEFAULT, OTHER):
            context = folder / "context"
            context.mkdir(exist_ok=True)
            (context / "image").write_text(f"{name}\n")
            (context / "Dockerfile").write_text(f"FROM {images.HOST}\nCOPY image /image\n")
            self("build", "--quiet", "--tag", name, str(context))

    def __call__(self, *words: str, check: bool = True) -> str:
        """Run a command of podman and return what it wrote."""
        env = {**os.environ, **self.env}
        done = subprocess.run(["podman", *words], env=env, capture_output=True, text=True, timeout=60, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def containers(self) -> list[str]:
        """Return the names of all containers, also of those that have ended."""
        return self("ps", "--all", "--format", "{{.Names}}").split()

    def close(self) -> None:
        """Remove everything."""
        self("rm", "--force", "--all", "--time=0", check=False)
        self("rmi", "--force", "--all", check=False)
        for _ in range(20):
            shutil.rmtree(self.folder, ignore_errors=True)
            if not self.folder.exists():
                return
            time.sleep(0.1)


def why_not() -> str:
    """Return why no containers can be run on this machine; "" if they can."""
    if os.geteuid() != 0:
        return "containers are run as root here"
    missing = [name for name in ("podman", "runc") if shutil.which(name) is None]
    return f"{' and '.join(missing)} of Debian is not installed: make test installs it as root" if missing else ""


def needed() -> None:
    """Skip a test where there are no containers; in CI it fails."""
    if why := why_not():
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
