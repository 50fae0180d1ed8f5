"""Copies the pages' JavaScript and styles from npm into the package when a wheel or an sdist is built.

Called by hatchling (see `tool.hatch.build.hooks.custom`) and by `make setup`; an editable install does not need it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VENDOR = Path("quota_service/makeway_quota/web/static/vendor")

# What the pages load, and the licences that travel with it: where npm puts it → its name in VENDOR.
PARTS = {
    "htmx.org/dist/htmx.min.js": "htmx.min.js",
    "htmx.org/dist/ext/hx-sse.min.js": "hx-sse.min.js",
    "htmx.org/LICENSE": "htmx.LICENSE",
    "uplot/dist/uPlot.iife.min.js": "uPlot.iife.min.js",
    "uplot/dist/uPlot.min.css": "uPlot.min.css",
    "uplot/LICENSE": "uPlot.LICENSE",
}


class MissingParts(RuntimeError):
    """The npm parts are neither installed nor already copied."""


def copy_vendor(root: Path) -> list[Path]:
    """Copy what the pages load from `node_modules` into the package and return the files.

    Without `node_modules` the files that are already there are kept: that is how an sdist becomes a wheel.
    """
    target = root / VENDOR
    modules = root / "node_modules"
    files = []
    for source, name in PARTS.items():
        file = target / name
        if (modules / source).is_file():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(modules / source, file)
        elif not file.is_file():
            raise MissingParts(f"{name} is missing: run `make setup` first, which installs it from package-lock.json.")
        files.append(file)
    return files


class VendorHook(BuildHookInterface[Any]):
    """Build hook: every wheel and sdist contains the npm parts."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Copy before the files are collected; `version` is `editable` for a development install."""
        if version != "editable":
            copy_vendor(Path(self.root))


if __name__ == "__main__":
    copy_vendor(Path(__file__).resolve().parent)
