"""Simulate a policy with a recorded workload: the service's own decisions on a clock that jumps."""

from .command import simulate_command
from .trace import TraceInvalid, read_trace

__all__ = ["TraceInvalid", "read_trace", "simulate_command"]
