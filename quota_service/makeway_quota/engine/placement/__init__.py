"""Where the workers of a workload fit, and which place is best."""
