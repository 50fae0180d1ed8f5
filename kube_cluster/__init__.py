"""A Kubernetes cluster on one machine, for development and tests: `make kube`, or `python -m kube_cluster`.

The control plane is the real one and needs no privileges. Simulated nodes (kwok) make it large; a real node (kubelet,
containerd) needs root. Everything that a cluster makes is found again from its folder, so that it can be removed after
any crash.

This module imports none of the others: the processes that wait for long inside of a cluster load only what they need.
"""
