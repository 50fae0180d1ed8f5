"""Use Makeway in a notebook: `%load_ext makeway`, then `%gpus`, `%%train`, `%jobs`.

From Python: `makeway.gpus()`, `makeway.submit(…)`, `makeway.job(id)`, `makeway.jobs()`, `makeway.usage()`, and
`makeway.checkpoint` inside training code. Importing this package loads nothing else: its names are imported when used.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # the agent of machines keeps `typing` out of its memory
if TYPE_CHECKING:
    from typing import Any

    from . import checkpoint
    from .connection import connect
    from .magics import load_ipython_extension, unload_ipython_extension
    from .problems import JobError, Refused
    from .submission import submit
    from .team_usage import usage
    from .teams import gpus_now as gpus
    from .training import Job, Jobs, job, jobs

__version__ = "0.1.0"

_HOME = {
    "Job": "training.Job",
    "JobError": "problems.JobError",
    "Jobs": "training.Jobs",
    "Refused": "problems.Refused",
    "connect": "connection.connect",
    "gpus": "teams.gpus_now",
    "job": "training.job",
    "jobs": "training.jobs",
    "load_ipython_extension": "magics.load_ipython_extension",
    "submit": "submission.submit",
    "unload_ipython_extension": "magics.unload_ipython_extension",
    "usage": "team_usage.usage",
}

__all__ = [
    "Job",
    "JobError",
    "Jobs",
    "Refused",
    "checkpoint",
    "connect",
    "gpus",
    "job",
    "jobs",
    "load_ipython_extension",
    "submit",
    "unload_ipython_extension",
    "usage",
]


def __getattr__(name: str) -> Any:
    if name == "checkpoint":
        return importlib.import_module(".checkpoint", __name__)
    if name in _HOME:
        module, _, attribute = _HOME[name].partition(".")
        return getattr(importlib.import_module(f".{module}", __name__), attribute)
    raise AttributeError(f"makeway has no {name!r}; it has {', '.join(__all__)}.")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
