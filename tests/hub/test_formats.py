"""The pages' scripts write numbers and durations as Python does."""

from __future__ import annotations

import json
import subprocess

from makeway_api.durations import duration
from makeway_api.quantities import number
from makeway_hub import nodejs
from makeway_hub.pages import STATIC

SCRIPT = """
import { duration, number } from %s;
const given = %s;
console.log(JSON.stringify([given.map(duration), given.map(number)]));
"""


def test_scripts_and_python_share_one_format() -> None:
    given = [
        2.5,
        0,
        0.04,
        0.4,
        0.97,
        1,
        45,
        59.7,
        60,
        90,
        599,
        754,
        3599,
        3600,
        7500,
        86_399,
        86_400,
        273_600,
        0.125,
        1 / 3,
        7912,
        1234567.5,
    ]
    program = nodejs.find_node()
    assert program, "the Hub's proxy needs node anyway"
    script = SCRIPT % (json.dumps((STATIC / "formats.js").as_uri()), json.dumps(given))
    done = subprocess.run(
        [program, "--no-warnings", "--input-type=module", "--eval", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[duration(n) for n in given], [number(n) for n in given]]
