"""Merge what Makeway needs into the Hub's configuration, and keep what the site has set there.

Used on one machine (`configure`) and on a cluster (`cluster`) alike. Everything may be called again.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

from jupyterhub.app import JupyterHub
from traitlets.config.loader import LazyConfigValue

from .access import CUSTOM_SCOPES, FOR_SERVERS, FOR_USERS, SERVER_SCOPES, roles
from .address import CannotStart
from .pages import TEMPLATES, with_pages

_LISTS = ("users", "groups", "services", "scopes")


def value(section: Any, name: str, default: Any) -> Any:
    """Return what a configuration has set, also by `append` or `update` without an assignment; else the default."""
    result = section.get(name, default)
    return result.get_value(copy(default)) if isinstance(result, LazyConfigValue) else result


def set_default(section: Any, name: str, default: Any) -> None:
    """Set a trait unless the site has; a set or a mapping of the site is added to it."""
    result = section.get(name)
    if result is None:
        setattr(section, name, default)
    elif isinstance(result, LazyConfigValue):
        setattr(section, name, result.get_value(copy(default)))
    elif isinstance(default, set):
        setattr(section, name, default | set(result))
    elif isinstance(default, dict):
        setattr(section, name, {**default, **result})


def merge_roles(c: Any, admin_users: Sequence[str], admin_groups: Sequence[str]) -> None:
    """Add Makeway's scopes to the role of all users, and Makeway's own roles; the site's stay."""
    c.JupyterHub.custom_scopes = dict(value(c.JupyterHub, "custom_scopes", {})) | CUSTOM_SCOPES
    result: dict[str, dict[str, Any]] = {}
    for role in value(c.JupyterHub, "load_roles", []):
        result[role["name"]] = _merged(result.get(role["name"], {}), role)  # JupyterHub refuses a name that comes twice
    user = result.setdefault("user", {"name": "user", "scopes": ["self"]})
    user["scopes"] = _joined(user.get("scopes"), FOR_USERS)
    for role in roles(admin_users, admin_groups):
        result[role["name"]] = _merged(result.get(role["name"], {}), role)
    c.JupyterHub.load_roles = list(result.values())


def _merged(role: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    lists = {name: _joined(role.get(name), other.get(name)) for name in _LISTS if name in role or name in other}
    return {**role, **other, **lists}


def _joined(*lists: Sequence[str] | None) -> list[str]:
    return list(dict.fromkeys(one for many in lists for one in many or ()))


def merge_services(c: Any, own: Sequence[dict[str, Any]]) -> None:
    """Add Makeway's services, or complete the site's entries of their names; others stay."""
    result = [dict(one) for one in value(c.JupyterHub, "services", [])]
    for service in own:
        known = next((one for one in result if one.get("name") == service["name"]), None)
        if known is None:
            result.append(dict(service))
        else:
            known.update(service)
    c.JupyterHub.services = result


def merge_pages(c: Any, panel: str) -> None:
    """Add Makeway's templates and handlers; the site's stay, but for templates of the same names as Makeway's."""
    hub = c.JupyterHub
    hub.tornado_settings = {**value(hub, "tornado_settings", {}), "slow_spawn_timeout": 1}
    paths = [str(path) for path in value(hub, "template_paths", []) if str(path) != str(TEMPLATES)]
    hub.template_paths = [str(TEMPLATES), *paths]
    hub.template_vars = {**value(hub, "template_vars", {}), "makeway_panel": panel}
    named = hub.get("authenticator_class", JupyterHub.authenticator_class.default_value)
    hub.authenticator_class = with_pages(JupyterHub.authenticator_class.validate(None, named))


def hidden_templates(c: Any) -> list[str]:
    """Return the site's templates that Makeway's of the same names hide."""
    own = {file.name for file in TEMPLATES.iterdir()}
    paths = [Path(path) for path in value(c.JupyterHub, "template_paths", []) if str(path) != str(TEMPLATES)]
    return sorted(str(path / name) for path in paths for name in own if (path / name).is_file())


def merge_server_scopes(c: Any) -> None:
    """Add the scopes of a notebook's token with which its user uses Makeway; the site's stay."""
    scopes = value(c.Spawner, "server_token_scopes", SERVER_SCOPES)
    c.Spawner.server_token_scopes = _joined(scopes, FOR_SERVERS)


def check_spawn_page(c: Any, kinds: Sequence[str]) -> None:
    """Raise CannotStart for traits of these classes of spawners that take the place of Makeway's spawn page."""
    for kind in kinds:
        for name in ("options_form", "options_from_form", "apply_user_options"):
            if name in c.get(kind, {}):
                raise CannotStart(
                    f"c.{kind}.{name} would replace Makeway's spawn page, which chooses profile and team: remove it. "
                    "Profiles are in the policy, and what each server gets besides in c.Spawner.environment and hooks."
                )
