"""Render the service's sentences: from the engine's codes and numbers, and about how workloads end (`outcomes`).

The engine names workloads, teams, pools and profiles by id; `Names` turns ids into what people call them.
"""

from __future__ import annotations

from . import outcomes
from .amounts import count, duration, gpus, gpus_are, names, number
from .naming import IDS, Names
from .sentences import sentence

__all__ = ["IDS", "Names", "count", "duration", "gpus", "gpus_are", "names", "number", "outcomes", "sentence"]
