"""State of the reference engine: cluster, quota, groups, and where workloads fit."""
