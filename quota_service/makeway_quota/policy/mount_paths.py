"""Check the paths at which volumes are mounted into the pods of jobs, and the folders of volumes."""

from __future__ import annotations

import re

TAKEN = ("/makeway", "/dev", "/proc", "/sys")
"""What a container has of Makeway (launcher, job, checkpoints) and of its node."""
PATH = re.compile(r"(/[^/\x00-\x1f:]+)+/?")


def path_problem(path: str) -> str:
    """Return why no volume can be mounted at a path, "" where one can."""
    parts = path.split("/")
    if not PATH.fullmatch(path) or "." in parts or ".." in parts or len(path) > 1000:
        return "it is no absolute path of a folder, such as /data"
    taken = next((one for one in TAKEN if path == one or path.startswith(f"{one}/")), None)
    return f"{taken} is not for volumes" if taken else ""


def folder_problem(folder: str) -> str:
    """Return why a text is no folder of a volume, "" where it is one, or empty."""
    if folder and not PATH.fullmatch(f"/{folder}"):
        return "it is no relative path of a folder, such as shared/models"
    return "it leads out of the volume or has needless parts" if {".", ".."} & {*folder.split("/")} else ""
