"""The tests in `units`, which import the frameworks, pass in the environment of the frameworks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import training_jobs as jobs

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(1200)]
UNITS = Path(__file__).parent / "units"


@pytest.mark.parametrize("file", sorted(path.name for path in UNITS.glob("test_*.py")))
def test_the_parts_of_the_adapters(file: str, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKEWAY", "PYTHON", "PYTEST"))}
    env |= {**jobs.QUIET, "PYTHONPATH": str(jobs.ROOT / "widgets")}
    options = ["-q", "-c", str(UNITS / "pytest.ini"), "--confcutdir", str(UNITS), "--basetemp", str(tmp_path / "t")]
    command = [str(jobs.PYTHON), "-m", "pytest", *options, str(UNITS / file)]
    done = subprocess.run(command, env=env, cwd=UNITS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-3000:]
