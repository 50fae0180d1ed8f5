"""Define the labels and annotations of Makeway's pods, which the spawner and the service set and the service reads."""

from __future__ import annotations

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "makeway"
"""The value of MANAGED_BY."""
INSTANCE = "makeway/instance"
"""The installation that a pod belongs to, as several may share a cluster."""
SESSION = "makeway/session"
"""The id of the session whose pod it is."""
TEAM = "makeway/team"
PROFILE = "makeway/profile"
PREEMPTIBLE = "makeway/preemptible"
OWNER = "makeway/owner"
"""An annotation, since names of users are no label values."""
PLACEMENT = "makeway/placement"
"""An annotation: the granted nodes and devices."""
