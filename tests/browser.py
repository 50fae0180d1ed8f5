"""Drive a real Chromium as a user: log in, pick a profile, run a notebook."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Error, Page, Playwright, expect, sync_playwright

expect.set_options(timeout=30_000)  # most take less than a second, but not on a machine that runs other tests beside

_NUMBER = re.compile(r"\[\d+\]:?")
MAX_TRIES = 3
WIDTH = 1280
"""Of a window, in pixels."""
ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yield Debian's Chromium, headless."""
    with sync_playwright() as playwright, _first_page() as first:
        browser = _launched(playwright, first)
        try:
            yield browser
        finally:
            browser.close()


def _launched(playwright: Playwright, first: str) -> Browser:
    """Start it and load one page: on a loaded machine it has died over its first one."""
    for remaining in reversed(range(MAX_TRIES)):
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=ARGS)
        try:
            page = browser.new_page()
            page.goto(first)
            page.close()
        except Error:
            browser.close()
            if not remaining:
                raise
        else:
            break
    return browser


@contextmanager
def _first_page() -> Iterator[str]:
    """Serve one plain page outside of any portal."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hello) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


class _Hello(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>ready</title>ready")

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class Person:
    """A user with a browser context of their own; requests to outside of the portal are recorded."""

    def __init__(self, browser: Browser, portal_url: str, name: str, password: str, *, dark: bool = False) -> None:
        self.base = portal_url.rstrip("/")
        self.name = name
        self.password = password
        self.outside: list[str] = []
        self.errors: list[str] = []
        self.context = browser.new_context(
            viewport={"width": WIDTH, "height": 900}, color_scheme="dark" if dark else "light"
        )
        self.context.set_default_timeout(60_000)
        self.page: Page = self.context.new_page()
        self.page.on("request", self._requested)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))

    def _requested(self, request: Any) -> None:
        if not request.url.startswith((self.base, self.base.replace("http", "ws", 1), "data:", "blob:")):
            self.outside.append(request.url)

    def close(self) -> None:
        """Close the browser window."""
        self.context.close()

    def log_in(self, to: str = "/hub/spawn") -> None:
        """Log in through the Hub's own form."""
        self.page.goto(f"{self.base}/hub/login?next={to}")
        self.page.fill("#username_input", self.name)
        self.page.fill("#password_input", self.password)
        self.page.click("#login_submit")
        self.page.wait_for_load_state()

    def row(self, queue: str) -> Any:
        """Return the picker's row of a team and profile, such as `rnd/gpu1`."""
        return self.page.locator(f'.mw-row[data-queue="{queue}"]')

    def start(self, queue: str) -> None:
        """Pick a row and press Start."""
        self.row(queue).locator("input[type=radio]").check()
        self.page.locator("#spawn_form button[type=submit]").click()

    def in_lab(self, seconds: float = 180) -> None:
        """Wait until JupyterLab is up."""
        self.page.wait_for_url(f"**/user/{self.name}/lab**", timeout=seconds * 1000)
        expect(self.page.locator("#jp-main-dock-panel, #main")).to_have_count(2, timeout=seconds * 1000)

    def open_notebook(self, path: str) -> None:
        """Open a notebook alone in JupyterLab, and wait for its kernel."""
        self.page.goto(f"{self.base}/user/{self.name}/lab/tree/{path}?reset")
        expect(self.page.locator(".jp-NotebookPanel .jp-Notebook .jp-Cell").first).to_be_visible(timeout=120_000)
        # A notebook without a kernel calls itself idle too: only a kernel's name says that there is one.
        expect(self.page.locator(".jp-NotebookPanel .jp-Toolbar-kernelName").first).to_have_text(
            "Python 3 (ipykernel)", timeout=120_000
        )
        expect(self.page.locator('.jp-NotebookPanel [data-status="idle"]').first).to_be_attached(timeout=120_000)

    def run_cell(self, index: int, seconds: float = 120) -> str:
        """Run one code cell by its index; return its output."""
        cell = self.page.locator(".jp-NotebookPanel .jp-CodeCell").nth(index)
        prompt = cell.locator(".jp-InputArea-prompt")
        before = prompt.inner_text()
        deadline, pressed = time.monotonic() + seconds, 0.0
        while (now := prompt.inner_text()) == before or not _NUMBER.search(now):
            assert time.monotonic() < deadline, f"cell {index} did not end within {seconds:g} s"
            if "*" not in now and time.monotonic() > pressed + 3:
                # JupyterLab drops what is run while its kernel still connects: press again.
                self._answer()
                cell.locator(".cm-content").click()
                self.page.keyboard.press("Control+Enter")
                pressed = time.monotonic()
            self.page.wait_for_timeout(50)
        return cell.locator(".jp-OutputArea").inner_text() if cell.locator(".jp-OutputArea-output").count() else ""

    def _answer(self) -> None:
        """Confirm JupyterLab's dialog for a kernel, shown when a cell runs before the list of kernels is loaded."""
        dialog = self.page.locator("dialog.jp-Dialog")
        if dialog.count():
            asked = dialog.first.inner_text()
            assert "Select Kernel" in asked, f"JupyterLab asks: {asked}"
            assert "Python 3 (ipykernel)" in asked, asked
            dialog.first.locator("button.jp-mod-accept").click()
            expect(dialog).to_have_count(0)

    def theme(self, name: str) -> None:
        """Switch JupyterLab's theme."""
        self.page.locator(".lm-MenuBar-itemLabel", has_text="Settings").click()
        self.page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Theme$")).click()
        self.page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{re.escape(name)}$")).click()
        expect(self.page.locator(f'body[data-jp-theme-name="{name}"]')).to_be_attached()


def notebook(folder: Path, name: str, cells: list[str]) -> None:
    """Write a notebook into a user's home."""
    body = {
        "cells": [
            {"cell_type": "code", "id": f"c{i}", "metadata": {}, "execution_count": None, "outputs": [], "source": text}
            for i, text in enumerate(cells)
        ],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    (folder / name).write_text(json.dumps(body))
