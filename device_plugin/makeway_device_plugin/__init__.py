"""A device plugin for Kubernetes that offers virtual GPUs on a node, for clusters without GPUs.

Run `makeway-device-plugin --count 8` as root on the node, or `python -m makeway_device_plugin`. Pods that
request `nvidia.com/gpu` are scheduled and counted as on nodes with GPUs; no program can compute on them.
"""

from __future__ import annotations

__version__ = "0.1.0"
