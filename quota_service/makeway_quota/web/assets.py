"""Files that pages need, all from here: our own, the vendored scripts, and JupyterHub's look."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from fastapi import FastAPI, Response
from jupyterhub._data import DATA_FILES_PATH
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from .settings import WebSettings

OWN_STATIC = Path(__file__).parent / "static"
HUB_STATIC = Path(DATA_FILES_PATH) / "static"
HUB_PATHS = (
    "css/",
    "components/bootstrap/",
    "components/@fortawesome/fontawesome-free/css/",
    "components/@fortawesome/fontawesome-free/webfonts/",
    "images/",
    "js/darkmode.js",
)


class _CachedStaticFiles(StaticFiles):
    """Static files that browsers may keep; addresses carry a version."""

    def __init__(self, directory: Path, allowed_prefixes: tuple[str, ...] = ("",)) -> None:
        super().__init__(directory=directory)
        self.allowed_prefixes = allowed_prefixes

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path if path.startswith(self.allowed_prefixes) else "..", scope)
        response.headers["Cache-Control"] = "public, max-age=86400"
        return response


def mount(app: FastAPI, settings: WebSettings) -> None:
    """Serve {prefix}static/hub/… from the installed JupyterHub and {prefix}static/… from this package."""
    app.mount(f"{settings.prefix}static/hub", _CachedStaticFiles(HUB_STATIC, HUB_PATHS), name="hub-static")
    app.mount(f"{settings.prefix}static", _CachedStaticFiles(OWN_STATIC), name="static")


@cache
def version(path: str) -> str:
    """Return a short hash of a file's content, so that a new one is fetched and an old one kept."""
    file = HUB_STATIC / path.removeprefix("hub/") if path.startswith("hub/") else OWN_STATIC / path
    return hashlib.sha256(file.read_bytes()).hexdigest()[:10] if file.is_file() else "0"
