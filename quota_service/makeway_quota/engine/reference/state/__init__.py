"""State of the reference engine: cluster, quota, queues, and where workloads fit."""
