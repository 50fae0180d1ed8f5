"""Find the name of the notebook for its jobs: its present one, else one made of the cell."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
import unicodedata
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2

from .problems import Refused

TIMEOUT = 0.5
"""Seconds that the notebook's server may take to name the notebook"""
MAX_LENGTH = 200
"""Characters of a job's name"""
REORDERING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that make a text read in another order than it is written"""


def check_name(name: str) -> None:
    """Raise Refused for a name that is too long or would not be shown as it is written."""
    if len(name) > MAX_LENGTH:
        raise Refused(f"the name has {len(name)} characters; the limit is {MAX_LENGTH}.")
    for character in name:
        if character in REORDERING or unicodedata.category(character) == "Cc":
            title = unicodedata.name(character, "a control character")
            raise Refused(
                f"the name contains U+{ord(character):04X} ({title}), which changes how it is shown; omit it."
            )


def notebook_name() -> str:
    """Return the notebook's file name without its suffix; empty where it is not known.

    The server knows the present one. The kernel's environment has that of its start, which counts as long as there
    is such a file.
    """
    if not (started := os.environ.get("JPY_SESSION_NAME", "")):
        return ""
    path = Path(started)
    if (present := _present_path()) is not None:
        path = Path(present)
    elif path.is_absolute() and path.parent.is_dir() and not path.exists():
        return ""
    stem = re.sub(r"-[0-9a-f]{8}-[0-9a-f-]{20,}$", "", path.stem)
    return _shown(stem)[:MAX_LENGTH]


def name_of_cell(source: str) -> str:
    """Return a name made of the cell: its first comment, else its last line of code."""
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    if lines and lines[0].startswith("#") and (comment := lines[0].lstrip("#%! ").strip()):
        return _shown(comment)[:60].strip()
    with suppress(SyntaxError, ValueError):
        body = ast.parse(source).body
        if body:
            return _shown(ast.unparse(body[-1]).splitlines()[0])[:60].strip()
    return ""


def _shown(text: str) -> str:
    """Return a text that is a valid name."""
    return "".join(c for c in text if c not in REORDERING and unicodedata.category(c) != "Cc")


def _present_path() -> str | None:
    """Return the path of this kernel's notebook as its server knows it now; None where the server does not tell."""
    kernel = _kernel_id()
    with suppress(Exception):
        for server in _servers():
            token = server.get("token") or os.environ.get("JUPYTERHUB_API_TOKEN", "")
            answer = httpx2.get(
                f"{server['url'].rstrip('/')}/api/sessions",
                headers={"Authorization": f"token {token}"},
                timeout=TIMEOUT,
                trust_env=False,
            )
            for session in answer.raise_for_status().json():
                if kernel and session["kernel"]["id"] == kernel and session.get("type") == "notebook":
                    return str(session["path"])
    return None


def _servers() -> list[dict[str, Any]]:
    """Return the running notebook server that started this kernel."""
    from jupyter_core.paths import jupyter_runtime_dir

    file = Path(jupyter_runtime_dir()) / f"jpserver-{os.environ.get('JPY_PARENT_PID', '')}.json"
    return [json.loads(file.read_text())] if file.is_file() else []


def _kernel_id() -> str:
    """Return the id of this kernel, which its connection file is called by."""
    with suppress(Exception):
        kernel = sys.modules["ipykernel.kernelapp"].IPKernelApp.instance()
        return Path(kernel.connection_file).stem.removeprefix("kernel-")
    return ""
