"""The image in which trainings run on a node: the notebook's, with the frameworks of the same lock file."""

from __future__ import annotations

import shutil
from pathlib import Path

import set_up
import set_up_frameworks

from kube_cluster import image_build

IMAGE = "makeway.test/training:1"
DOCKERFILE = Path(__file__).parent / "frameworks" / "image" / "Dockerfile"
NEEDED_MIB = 8000
"""For packages, layer and archive, and for what a node unpacks; 4 GB stay until the node is removed."""


def build(folder: Path) -> Path:
    """Build the image and return its archive in this folder; NotHere or SetUpProblem where that cannot be."""
    free = shutil.disk_usage(folder).free // 2**20
    if free < NEEDED_MIB:
        raise set_up.SetUpProblem(f"The image with the frameworks needs {NEEDED_MIB} MiB, and {free} MiB are free.")
    notebook = image_build.build(["notebook"])["notebook"]
    packages(folder / "packages")
    shutil.copy(DOCKERFILE, folder)
    archive = image_build.build_upon(IMAGE, folder, notebook, {"PYTHON": image_build.PYTHON})
    shutil.rmtree(folder / "packages")
    return archive


def packages(folder: Path) -> None:
    """Install the frameworks into a folder, for the Python of the images; SetUpProblem where that cannot be."""
    frameworks = set_up_frameworks.Frameworks(set_up.ROOT)
    with frameworks.one_at_a_time():
        frameworks.copy(folder, image_build.PYTHON)
