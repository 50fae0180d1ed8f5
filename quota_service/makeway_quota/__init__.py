"""The quota service: it observes the cluster, plans, applies the plan, and explains every decision."""

__version__ = "0.1.0"
