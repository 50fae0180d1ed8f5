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

HERE = Path(__file__).parent / "static"
HUB = Path(DATA_FILES_PATH) / "static"
FROM_HUB = (
    "css/",
    "components/bootstrap/",
    "components/@fortawesome/fontawesome-free/css/",
    "components/@fortawesome/fontawesome-free/webfonts/",
    "images/",
    "js/darkmode.js",
)


class _Kept(StaticFiles):
    """Static files that browsers may keep; addresses carry a version."""

    def __init__(self, directory: Path, only: tuple[str, ...] = ("",)) -> None:
        super().__init__(directory=directory)
        self.only = only

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path if path.startswith(self.only) else "..", scope)
        response.headers["Cache-Control"] = "public, max-age=86400"
        return response


def mount(app: FastAPI, settings: WebSettings) -> None:
    """Serve {prefix}static/hub/… from the installed JupyterHub and {prefix}static/… from this package."""
    app.mount(f"{settings.prefix}static/hub", _Kept(HUB, FROM_HUB), name="hub-static")
    app.mount(f"{settings.prefix}static", _Kept(HERE), name="static")


@cache
def version(path: str) -> str:
    """Return a short hash of a file's content, so that a new one is fetched and an old one kept."""
    file = HUB / path.removeprefix("hub/") if path.startswith("hub/") else HERE / path
    return hashlib.sha256(file.read_bytes()).hexdigest()[:10] if file.is_file() else "0"
