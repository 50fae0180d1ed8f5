"""Define the labels and annotations of Makeway's pods, which the spawner and the service set and the service reads."""

from __future__ import annotations

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "makeway"
"""The value of MANAGED_BY."""
INSTANCE = "makeway/instance"
"""The installation that a pod belongs to, as several may share a cluster."""
SESSION = "makeway/session"
"""The id of the session whose pod it is."""
KIND = "makeway/kind"
"""What the pod is of: a job or a session."""
TEAM = "makeway/team"
PROFILE = "makeway/profile"
PREEMPTIBLE = "makeway/preemptible"
OWNER = "makeway/owner"
"""An annotation, since names of users are no label values."""
PLACEMENT = "makeway/placement"
"""An annotation: the granted nodes and devices."""
STAYS_PUT = {"karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
"""Annotations by which autoscalers do not move a pod to another node, which would end what runs in it."""
