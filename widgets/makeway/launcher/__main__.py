"""Start the launcher, as `python -m makeway.launcher` or by the path of its folder."""

from __future__ import annotations

import importlib
import os
import sys

if not __package__:
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.exit(importlib.import_module(f"{__package__ or 'launcher'}.run").main(sys.argv[1:]))
