"""Build Helm once from its Go modules, and run it on a cluster: for the tests of the chart, and for trying it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from .problems import KubeProblem
from .programs import tool, tool_folder

VERSION = "4.3.1"
SOURCES = Path(__file__).parent / "helm_binary"
FLAGS = (
    "-trimpath",
    "-buildvcs=false",
    "-ldflags",
    f"-s -w -X helm.sh/helm/v4/internal/version.version=v{VERSION}",
)


def is_built() -> bool:
    """Whether Helm is in the cache."""
    return (tool_folder("helm", SOURCES, FLAGS) / "helm").exists()


def helm() -> Path:
    """Return Helm; build it first if it is not in the cache."""
    return tool("helm", "Helm", "0.4 GB on disk", SOURCES, FLAGS)


class Helm:
    """Helm as one user of one cluster; without a kubeconfig it can lint and render only."""

    def __init__(self, folder: Path, kubeconfig: Path | None = None) -> None:
        """`folder` keeps Helm's own files, so that those of the user are not read."""
        self.kubeconfig = kubeconfig
        self._program = helm()
        self._environ = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(folder),
            "HELM_CACHE_HOME": str(folder / "cache"),
            "HELM_CONFIG_HOME": str(folder / "config"),
            "HELM_DATA_HOME": str(folder / "data"),
            "KUBECONFIG": str(kubeconfig or os.devnull),
        }

    def run(self, *arguments: str | Path) -> str:
        """Run a command and return what it printed; KubeProblem with what it said when it fails."""
        done = subprocess.run(
            [self._program, *arguments], env=self._environ, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise KubeProblem(f"helm {arguments[0]} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def template(self, chart: Path, release: str, namespace: str, options: Iterable[str | Path] = ()) -> str:
        """Render a chart without a cluster and return the manifests."""
        return self.run("template", release, chart, "--namespace", namespace, *options)
