"""Placement: where the workers of a workload fit, and which node is best."""
