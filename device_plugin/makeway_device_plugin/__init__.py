"""A device plugin for Kubernetes that offers virtual GPUs on a node, to try Makeway on a cluster without any.

Run `makeway-device-plugin --count 8` as root on the node, or `python -m makeway_device_plugin`. Pods that ask for
`nvidia.com/gpu` are scheduled and counted as on a machine with GPUs; no program can compute on them.
"""

from __future__ import annotations

__version__ = "0.1.0"
