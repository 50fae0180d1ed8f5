"""Start the agent, as `python -m makeway.agent` or by the path of its folder; in `agent.pyz`, unpack it first."""

from __future__ import annotations

import importlib
import os
import sys

if not __package__:
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.exit(importlib.import_module("makeway.agent.command").main(sys.argv[1:]))
