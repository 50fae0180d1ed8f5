"""Run short commands of the system (ip, mount, ctr) and turn their failures into sentences."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .problems import KubeProblem


def run(command: Sequence[str | Path]) -> str:
    """Run a command and return what it printed; raise KubeProblem with what it said when it fails."""
    words = [str(part) for part in command]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except FileNotFoundError as missing:
        raise KubeProblem(f"The program {words[0]} is missing: `make kube` installs it.") from missing
    if done.returncode:
        raise KubeProblem(f"`{' '.join(words)}` failed: {(done.stderr or done.stdout).strip()[-800:] or 'no reason'}")
    return done.stdout


def succeeds(command: Sequence[str | Path]) -> bool:
    """Whether a command succeeds."""
    return subprocess.run([str(part) for part in command], capture_output=True, check=False).returncode == 0


def missing_packages(packages: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the packages of which this machine has no file; a name without a slash is a program on PATH."""

    def there(file: str) -> bool:
        return Path(file).exists() if "/" in file else shutil.which(file) is not None

    return [name for name, any_of in packages.items() if not any(map(there, any_of))]
