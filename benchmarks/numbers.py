"""Write what was measured into a page of the documentation, between two marks."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from pathlib import Path

from .measure import machine

BEGIN, END = "<!-- numbers: {name} -->", "<!-- /numbers -->"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table, with the machine below it."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([*lines, "", f"Measured on: {machine()}."])


def page_for(name: str) -> Callable[[str], Path]:
    """Return an argparse type that reads the path of a page and refuses one without the marks of `name`."""

    def read(text: str) -> Path:
        page, begin = Path(text), BEGIN.format(name=name)
        if not page.is_file():
            raise ArgumentTypeError(f"there is no page {text}")
        if begin not in page.read_text(encoding="utf-8"):
            raise ArgumentTypeError(f"{text} has no line {begin}")
        return page

    return read


def insert(page: Path, name: str, text: str) -> None:
    """Replace what stands between the marks of `name`; ValueError where the page has no such marks."""
    begin = BEGIN.format(name=name)
    old = page.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(old):
        raise ValueError(f"{page} has no line {begin}")
    page.write_text(pattern.sub(lambda _: f"{begin}\n{text}\n{END}", old), encoding="utf-8")
