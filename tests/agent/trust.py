"""Folders of certificates as OpenSSL looks them up: by the hash of the subject."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def hash_certificates(folder: Path) -> None:
    """Link each certificate of a folder under its hash, as `update-ca-certificates` does; skip without OpenSSL."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl, which names certificates by their hashes")
    subprocess.run([openssl, "rehash", str(folder)], check=True, capture_output=True)
