"""The page docs/how-to/on-your-cluster.md, walked on the cluster of the tests: its files written, its commands run."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import yaml
from charts import Object

from kube_cluster import programs
from kube_cluster.cluster import Cluster
from kube_cluster.helm import helm
from kube_cluster.image_build import REPOSITORY

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how-to" / "on-your-cluster.md"
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
STEPS = range(1, 11)
NOT_WALKED = 2
"""There is no registry to push to: the images are imported into the node."""
PLACEHOLDERS = {"registry.example/makeway": REPOSITORY, "NODE ": "node-0 "}


def section(title: str, page: Path = PAGE) -> str:
    """Return a section of the page, or of another one."""
    (result,) = re.findall(
        rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    return str(result)


def item(text: str, title: str) -> str:
    """Return the item of a list that begins with a title in bold."""
    (result,) = (part for part in re.split(r"^(?=- \*\*)", text, flags=re.MULTILINE) if part.startswith(f"- **{title}"))
    return result


def blocks(text: str, kind: str) -> list[str]:
    """Return the blocks of one kind in a part of the page, with what this cluster has instead of placeholders."""
    result = [dedent(block) for _, language, block in FENCE.findall(text) if language == kind]
    for word, instead in PLACEHOLDERS.items():
        result = [block.replace(word, instead) for block in result]
    return result


def steps() -> dict[int, str]:
    """Return the text of each step by its number."""
    parts = re.split(r"^(?=\d+\. \*\*)", section("Ten steps"), flags=re.MULTILINE)[1:]
    return {int(part.partition(".")[0]): part for part in parts}


def file_of(number: int, name: str) -> str:
    """Return the file that a step says to write."""
    text = steps()[number]
    assert f"`{name}`" in text
    (result,) = blocks(text, "yaml")
    return result


def values() -> Object:
    """Return the values of the page."""
    return dict(yaml.safe_load(file_of(6, "my-values.yaml")))


class Walk:
    """The terminal of an administrator who follows the page, in a folder with what the page needs of the checkout."""

    def __init__(self, cluster: Cluster, folder: Path, kubeconfig: Path | None = None) -> None:
        """`kubeconfig`: of another user than the cluster's administrator."""
        self.folder = folder
        programs_folder = folder / "bin"
        programs_folder.mkdir()
        (programs_folder / "kubectl").symlink_to(programs.kubectl())
        (programs_folder / "helm").symlink_to(helm())
        (folder / "helm").symlink_to(ROOT / "helm")
        self._environ = {
            "PATH": f"{programs_folder}:{os.environ['PATH']}",
            "HOME": str(folder),
            "KUBECONFIG": str(kubeconfig or cluster.kubeconfig),
        }

    def write(self) -> None:
        """Write the files of the steps."""
        (self.folder / "policy.yaml").write_text(file_of(5, "policy.yaml"), encoding="utf-8")
        self.write_values(values())

    def write_values(self, changed: Object) -> None:
        """Write other values into the file of the steps."""
        (self.folder / "my-values.yaml").write_text(yaml.safe_dump(changed), encoding="utf-8")

    def step(self, number: int) -> str:
        """Run the commands of a step and return what they printed."""
        return "".join(self.run(block) for block in blocks(steps()[number], "sh"))

    def run(self, commands: str) -> str:
        """Run commands as a shell does, until the first that fails."""
        done = subprocess.run(
            ["bash", "-euc", commands], cwd=self.folder, env=self._environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def running(self, command: str) -> Iterator[None]:
        """Run a command that does not end by itself beside the block."""
        process = subprocess.Popen(
            ["bash", "-euc", f"exec {command}"], cwd=self.folder, env=self._environ, stdout=subprocess.DEVNULL
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(60)
