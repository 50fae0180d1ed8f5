"""Answer what the cluster has, who uses it, and what can start now."""
