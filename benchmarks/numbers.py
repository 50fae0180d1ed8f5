"""Puts what was measured into a page of the documentation, between two marks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from .measure import machine

BEGIN, END = "<!-- numbers: {name} -->", "<!-- /numbers -->"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table, with the machine below it."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([*lines, "", f"Measured on: {machine()}."])


def insert(page: Path, name: str, text: str) -> None:
    """Replace what stands between the marks of `name`; ValueError where the page has no such marks."""
    begin = BEGIN.format(name=name)
    old = page.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(old):
        raise ValueError(f"{page} has no line {begin}")
    page.write_text(pattern.sub(lambda _: f"{begin}\n{text}\n{END}", old), encoding="utf-8")
