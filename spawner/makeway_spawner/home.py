"""Make a sample user's home in the demo: a directory of their own with the tour in it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

TOUR = Path(__file__).parent / "welcome"

_NO_NEWS = {
    "lab/user-settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings": {
        "fetchNews": "false",
        "checkForUpdates": False,
    },
}
"""Without these settings JupyterLab opens with a dialog about reading news from the internet."""


def home_of(homes: Path, name: str) -> Path:
    """Return a user's home; characters that a directory name may not have become %xx, so that no two homes meet."""
    plain = re.sub(r"[^A-Za-z0-9._-]", lambda m: f"%{ord(m.group()):x}", name)
    return homes / (plain if not plain.startswith(".") else f"%2e{plain[1:]}")


def prepare(home: Path) -> None:
    """Make the home once: private, with the tour, and with JupyterLab's requests to outside switched off."""
    if home.is_dir():
        return
    home.mkdir(mode=0o700, parents=True)
    for file in sorted(TOUR.iterdir()) if TOUR.is_dir() else ():
        if file.suffix in {".ipynb", ".py", ".md"}:
            shutil.copyfile(file, home / file.name)
    for path, settings in _NO_NEWS.items():
        file = home / ".jupyter" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings, indent=2) + "\n")
