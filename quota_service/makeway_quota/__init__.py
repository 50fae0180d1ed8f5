"""The quota service: it sees the machines, asks the engine, carries the plan out, and tells everybody why."""

__version__ = "0.1.0"
