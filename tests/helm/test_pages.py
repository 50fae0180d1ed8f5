"""What the pages about the chart tell people to run, without a cluster."""

from __future__ import annotations

import socket
import subprocess
import sys

from makeway.launcher.remote import _order
from walk import blocks, steps


def test_the_cell_of_step_9_needs_nothing_that_a_device_plugin_sets() -> None:
    """NVIDIA's sets no CUDA_VISIBLE_DEVICES, unlike that of the tests' clusters."""
    (cell,) = (text for text in blocks(steps()[9], "python") if text.startswith("%%train"))
    (worker,) = _order({"gpus": 1.0, "step": 0, "saved_at": None}, {})["workers"]
    program = cell.partition("\n")[2]
    done = subprocess.run(
        [sys.executable, "-c", program], env=worker["env"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"GPUs of this job: 1 in the pod of {socket.gethostname()}\n"
