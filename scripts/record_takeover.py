"""Record what a killed service of a commit leaves behind, for the test that the code of today takes it over.

    make takeover COMMIT=COMMIT

Run it at each release, with the commit of the release before, and keep the earlier records: an installation may skip
releases. It writes `tests/service/takeovers/COMMIT.tar.gz`, with the database and the working folder.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "tests" / "service" / "takeovers"
SCENARIO = ROOT / "tests" / "service" / "takeover_scenario.py"
PACKAGES = ("quota_service", "widgets", "spawner", "hub_config")


def main(commit: str) -> None:
    """Run the scenario with the code of a commit, and pack what it leaves."""
    short = _git("rev-parse", "--short=8", commit).decode().strip()
    with tempfile.TemporaryDirectory() as folder:
        code, state = Path(folder) / "code", Path(folder) / "var"
        with tarfile.open(fileobj=io.BytesIO(_git("archive", commit, "tests", *PACKAGES))) as archive:
            archive.extractall(code, filter="data")
        places = [code / package for package in PACKAGES] + [code / "tests"]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
        done = subprocess.run([sys.executable, str(SCENARIO), str(state)], env=env, cwd=code, timeout=120, check=False)
        if done.returncode != -signal.SIGKILL:
            raise SystemExit(f"The scenario did not come to its end: {done.returncode}")
        RECORDS.mkdir(exist_ok=True)
        with tarfile.open(RECORDS / f"{short}.tar.gz", "w:gz") as archive:
            archive.add(state, "var", filter=_plain)
        _end_jobs(state)
    print(f"Wrote {RECORDS.relative_to(ROOT)}/{short}.tar.gz")


def _git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Return an entry without an owner; None for what is no file or folder, or compiled."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    wanted = (entry.isfile() or entry.isdir()) and "__pycache__" not in entry.name
    return entry if wanted else None


def _end_jobs(state: Path) -> None:
    """Kill what still runs of the scenario's jobs: the processes that have its folder in their environment."""
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            if f"MAKEWAY_JOB_DIR={state}/".encode() in (proc / "environ").read_bytes():
                os.kill(int(proc.name), signal.SIGKILL)
        except OSError:
            continue


if __name__ == "__main__":
    main(*sys.argv[1:])
