"""Add Makeway's handlers to the Hub: links to the picker (its options form), and script and style files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jupyterhub.handlers.pages import SpawnHandler
from tornado.web import StaticFileHandler

HERE = Path(__file__).parent
TEMPLATES = HERE / "templates"
STATIC = HERE / "static"
LINK_KEYS = ("profile", "team")
"""Query arguments of a link that preselect an option"""
HUB_KEYS = frozenset({"next", "display_name"})
"""Query arguments that the Hub's own handler reads"""


class PickerHandler(SpawnHandler):  # type: ignore[misc]
    """The Hub's spawn page, except that a link (`?profile=gpu1&team=rnd`) preselects options.

    JupyterHub's own handler starts a server as soon as such a link is followed.
    """

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """Move the link's options from the query to `makeway_link`, which the picker (`makeway_spawner.form`) reads."""
        super().initialize(*args, **kwargs)
        self.makeway_link: dict[str, str] = {}
        if self.request.method != "GET":
            return
        for key in [key for key in self.request.query_arguments if key not in HUB_KEYS]:
            values = self.request.query_arguments.pop(key)
            name = key.removeprefix("opt-")
            if name in LINK_KEYS and values:
                self.makeway_link[name] = values[0].decode("utf-8", "replace").strip()


class AssetHandler(StaticFileHandler):
    """Makeway's script and style files; they change with a release, so browsers revalidate them each time."""

    def set_extra_headers(self, path: str) -> None:
        """Allow a cached copy, but only after revalidation."""
        self.set_header("Cache-Control", "no-cache")


class WithPages:
    """An authenticator with Makeway's handlers: those of an authenticator come before the Hub's own."""

    def get_handlers(self, app: Any) -> list[tuple[Any, ...]]:
        """Return the authenticator's handlers with the spawn page and the asset files."""
        handlers: list[tuple[Any, ...]] = list(super().get_handlers(app))  # type: ignore[misc]
        return [
            (r"/makeway-static/(.*)", AssetHandler, {"path": str(STATIC)}),
            (r"/spawn", PickerHandler),
            (r"/spawn/([^/]+)", PickerHandler),
            (r"/spawn/([^/]+)/([^/]+)", PickerHandler),
            *handlers,
        ]


def with_pages(authenticator: type) -> type:
    """Return an authenticator class with Makeway's pages.

    `c.JupyterHub.authenticator_class = with_pages(GitHubOAuthenticator)`
    """
    if issubclass(authenticator, WithPages):
        return authenticator
    return type(authenticator.__name__, (WithPages, authenticator), {})
