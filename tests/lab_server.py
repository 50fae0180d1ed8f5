"""A JupyterLab of its own whose kernels know a portal; for tests in a browser."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

TOKEN = "t"
READY = """async () => {
  const app = window.jupyterapp;
  await app.restored;
  let panel;
  while (!(panel = app.shell.currentWidget)?.context) {  // a notebook may be opened after that
    await new Promise(wait => setTimeout(wait, 50));
  }
  await panel.context.ready;
  await panel.sessionContext.ready;
}"""


def notebook_file(cells: list[str]) -> str:
    """Return a notebook with these cells."""
    made = [
        {"cell_type": "code", "id": f"c{n}", "metadata": {}, "source": text, "outputs": [], "execution_count": None}
        for n, text in enumerate(cells)
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return json.dumps({"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5})


@contextmanager
def lab_server(
    folder: Path, url: str, user: str, python: str | Path = sys.executable, **kernel_env: str
) -> Iterator[str]:
    """Run JupyterLab of an environment in a folder; yield its address. Its kernels are those of the tests' Python."""
    settings = folder / "config/lab/user-settings/@jupyterlab/apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "doNotDisturbMode": true}')
    kernel = folder / "data" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    kernels = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": kernels, "display_name": "Python 3 (ipykernel)", "language": "python", "env": kernel_env}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKEWAY_", "JUPYTER", "PYTEST_"))}
    env = {
        **clean,
        "MAKEWAY_URL": url,
        "MAKEWAY_TOKEN": user,
        "HOME": str(folder),
        "JUPYTER_PREFER_ENV_PATH": "0",  # the kernel above comes before that of the environment
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
    }
    options = [
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        "--port=0",
        f"--IdentityProvider.token={TOKEN}",
        "--expose-app-in-browser",
        f"--ServerApp.root_dir={folder}",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--JupyterNotebookApp.expose_app_in_browser=True",
    ]
    with open(folder / "lab.log", "w") as log:
        command = [str(python), "-m", "jupyterlab", *options]
        server = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
        try:
            yield _address(folder, server)
        finally:
            server.terminate()
            server.wait(60)


def _address(folder: Path, server: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        for file in folder.glob("runtime/jpserver-*.json"):
            url = str(json.loads(file.read_text())["url"])
            try:
                if httpx2.get(f"{url}api?token={TOKEN}").is_success:
                    return url
            except httpx2.HTTPError:
                pass
        time.sleep(0.2)
    raise AssertionError((folder / "lab.log").read_text())
