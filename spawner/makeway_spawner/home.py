"""A sample user's home in the demo: a directory of their own with the tour in it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

TOUR = Path(__file__).parent / "welcome"

_QUIET = {
    "lab/user-settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings": {
        "fetchNews": "false",
        "checkForUpdates": False,
    },
}
"""JupyterLab would ask at its first start whether it may read news from the internet."""


def home_of(homes: Path, name: str) -> Path:
    """Name a user's home; a name that is no plain directory name is made one without meeting another's."""
    plain = re.sub(r"[^A-Za-z0-9._-]", lambda m: f"%{ord(m.group()):x}", name)
    return homes / (plain if not plain.startswith(".") else f"%2e{plain[1:]}")


def prepare(home: Path) -> None:
    """Make the home once: private, with the tour, and JupyterLab told to ask nobody outside."""
    if home.is_dir():
        return
    home.mkdir(mode=0o700, parents=True)
    for file in sorted(TOUR.iterdir()) if TOUR.is_dir() else ():
        if file.suffix in {".ipynb", ".py", ".md"}:
            shutil.copyfile(file, home / file.name)
    for path, settings in _QUIET.items():
        file = home / ".jupyter" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings, indent=2) + "\n")
