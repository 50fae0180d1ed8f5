"""The scopes, roles and services of Makeway in a JupyterHub, on one machine and on a cluster alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SERVICE = "makeway"
SPAWNER = "makeway-spawner"
"""The names of the quota service and of the Hub's spawner among the Hub's services; each has a token of its own."""
SCOPES = {
    "custom:makeway:read": "See pools, offers, usage and the jobs of my teams",
    "custom:makeway:submit": "Submit training and manage my own jobs",
    "custom:makeway:manage": "Manage the jobs of a team",
    "custom:makeway:admin": "Change the policy and see all teams",
    "custom:makeway:reserve": "Request leases for notebooks on behalf of users (the Hub's spawner only)",
}
ACCESS = f"access:services!service={SERVICE}"
FOR_USERS = ["custom:makeway:read", "custom:makeway:submit", ACCESS]
FOR_ADMINS = ["custom:makeway:manage", "custom:makeway:admin"]
CUSTOM_SCOPES = {name: {"description": text} for name, text in SCOPES.items()}
SERVER_SCOPES = ["users:activity!user", "access:servers!server"]
"""What the token of a notebook may do in every JupyterHub."""
FOR_SERVERS = [*FOR_USERS, "custom:makeway:manage"]
"""What it may do besides, as far as its user may."""


def service_fields(url: str) -> dict[str, Any]:
    """Return what the Hub's entry of the quota service at this URL needs besides its name and token."""
    return {
        "url": url,
        "oauth_client_allowed_scopes": [name for name in SCOPES if name != "custom:makeway:reserve"],
        "oauth_no_confirm": True,
        "display": False,  # templates/page.html links to it
    }


def roles(admin_users: Sequence[str], admin_groups: Sequence[str]) -> list[dict[str, Any]]:
    """Return the roles of Makeway's administrators, users and groups of the Hub, and of the two services."""
    return [
        {
            "name": "makeway-admin",
            "description": "Administrators of Makeway",
            "scopes": [*FOR_USERS, *FOR_ADMINS],
            "users": sorted(admin_users),
            "groups": sorted(admin_groups),
        },
        {
            "name": "makeway-service",
            "description": "The quota service reads groups, and reconciles leases with running servers",
            "scopes": [
                *("list:users", "read:users", "read:groups", "list:groups", "read:servers", "delete:servers"),
                *("list:services", "read:services"),
            ],
            "services": [SERVICE],
        },
        {
            "name": "makeway-spawner",
            "description": "The Hub's spawner requests leases on behalf of users",
            "scopes": ["custom:makeway:reserve", "custom:makeway:read", ACCESS],
            "services": [SPAWNER],
        },
    ]
