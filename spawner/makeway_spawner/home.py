"""Make a sample user's home in the demo: a directory of their own with the tour in it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from pathlib import Path

TOUR = Path(__file__).parent / "welcome"

_NO_NEWS = {
    "lab/user-settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings": {
        "fetchNews": "false",
        "checkForUpdates": False,
    },
}
"""Without these settings JupyterLab opens with a dialog about reading news from the internet."""


_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_MAX_BYTES = 255
"""Bytes that the name of a file may have on Linux."""
_CLAIMING = threading.Lock()


def file_name(name: str, max_bytes: int = _MAX_BYTES) -> str:
    """Return a name as that of a file, of at most so many characters, such that no two names meet.

    Letters, digits, dots, dashes and underscores stay, other bytes of UTF-8 become `=XX`, a dot in front, too. What is
    too long ends in `==` and a hash, which no other name has.
    """
    data = name.encode("utf-8", "surrogatepass")
    text = "".join(chr(byte) if byte in _PLAIN else f"={byte:02X}" for byte in data)
    text = f"=2E{text[1:]}" if text.startswith(".") else text
    return text if len(text) <= max_bytes else f"{text[: max_bytes - 34]}=={hashlib.sha256(data).hexdigest()[:32]}"


def earlier_file_name(name: str) -> str:
    """Return how releases until November 2026 wrote a name: `%xx` with one to five digits, so that names could meet."""
    plain = re.sub(r"[^A-Za-z0-9._-]", lambda m: f"%{ord(m.group()):x}", name)
    return plain if not plain.startswith(".") else f"%2e{plain[1:]}"


def home_of(homes: Path, name: str) -> Path:
    """Return a user's home; no two users have the same."""
    return homes / file_name(name)


def prepare(home: Path, earlier: Path | None = None) -> None:
    """Make the home once: private, with the tour, and with JupyterLab's requests to outside switched off.

    `earlier`: where an earlier release made it, if that is surely not another user's. It stays there, and the home
    is a link to it, unless it became the home of another name.
    """
    if home.is_dir():
        return
    if earlier is not None and _take_over(home, earlier):
        return
    home.unlink(missing_ok=True)  # a link to what was deleted
    home.mkdir(mode=0o700, parents=True)
    for file in sorted(TOUR.iterdir()) if TOUR.is_dir() else ():
        if file.suffix in {".ipynb", ".py", ".md"}:
            shutil.copyfile(file, home / file.name)
    for path, settings in _NO_NEWS.items():
        file = home / ".jupyter" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings, indent=2) + "\n")


def _take_over(home: Path, earlier: Path) -> bool:
    """Link the home to a folder of an earlier release; return False where there is none, or another name has it."""
    with _CLAIMING:
        if earlier.is_symlink() or not earlier.is_dir():
            return False
        links = (path for path in home.parent.iterdir() if path.is_symlink())
        if any(os.readlink(link) == earlier.name for link in links):
            return False
        home.unlink(missing_ok=True)
        home.symlink_to(earlier.name, target_is_directory=True)
        return True
