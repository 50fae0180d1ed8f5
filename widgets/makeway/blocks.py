"""Render what an output shows as HTML, Markdown, LaTeX and plain text: one source for all front ends.

The HTML carries its few styles inline, has no style sheet, script, id or image, and uses only elements that
sanitizers keep (`div`, `span`, `b`, `code`, `table`, `tr`, `td`): without its styles it still reads right. All text is
escaped here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from makeway_api.tables import Column, aligned, plain
from markupsafe import Markup, escape

SOFT = "opacity:.72"
LINE = "rgba(128,128,128,.35)"
TONES = {
    "good": "var(--jp-success-color1,#2e8b57)",
    "bad": "var(--jp-error-color1,#d64545)",
    "warn": "var(--jp-warn-color1,#c9701b)",
}
"""Colours of states: JupyterLab's own, which are right on its light and dark pages"""
_CODE = (
    "font-family:var(--jp-code-font-family,monospace);font-size:.95em;background:none;color:inherit;padding:0;"
    "white-space:nowrap"
)
_ROOT = (
    "direction:ltr;text-align:left;font-family:var(--jp-ui-font-family,system-ui,sans-serif);"
    "font-size:var(--jp-ui-font-size1,13px);line-height:1.45;overflow-x:auto"
)
_CHIP = "display:inline-block;border:1px solid;border-radius:9px;padding:0 8px;font-size:.92em;white-space:nowrap"
_BANNER = "border-left:4px solid {};background:rgba(128,128,128,.12);padding:6px 10px;margin:4px 0"
_TABLE = "border-collapse:collapse;margin:4px 0;table-layout:auto;width:auto;font-size:inherit"
_CELL = "text-align:left;overflow-wrap:anywhere"
_NUMBER = "text-align:right;white-space:nowrap"
_OVERRIDES = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that turn the direction of the text around them"""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~$&])")


@dataclass(frozen=True, slots=True)
class Bold:
    """Emphasised text."""

    text: str


@dataclass(frozen=True, slots=True)
class Soft:
    """Text of less importance."""

    text: str


@dataclass(frozen=True, slots=True)
class Code:
    """What people type, and ids."""

    text: str


@dataclass(frozen=True, slots=True)
class Chip:
    """A short label, such as a state; `tone` is a key of TONES, or empty."""

    text: str
    tone: str = ""
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Drawing:
    """HTML of its own with the text that stands for it elsewhere, which may be empty."""

    html: Markup
    text: str = ""


Inline = str | Bold | Soft | Code | Chip | Drawing
Cell = Inline | tuple[Inline, ...]
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Line:
    """Words and labels on one line."""

    parts: tuple[Inline, ...]
    space: int = 0
    """pixels above it"""


@dataclass(frozen=True, slots=True)
class Banner:
    """A sentence that has to be seen; `status`: a screen reader says it when it appears."""

    text: str
    tone: str = "warn"
    status: bool = True


@dataclass(frozen=True, slots=True)
class Facts:
    """Labels with their texts, one pair on a line."""

    rows: Sequence[tuple[str, Cell]]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows below a head; the columns in `right` are numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    right: frozenset[int] = field(default_factory=frozenset)


Block = Line | Banner | Facts | Table | Drawing


def line(*parts: Inline, space: int = 0) -> Line:
    """Return a line of the given parts."""
    return Line(parts, space)


def tabulate(columns: Sequence[Column[Row, Cell]], rows: Sequence[Row]) -> Table:
    """Return the table that has these columns, without the optional ones that are empty."""
    shown = [column for column in columns if not column.optional or any(column.cell(row) for row in rows)]
    return Table(
        [column.name for column in shown],
        [[column.cell(row) for column in shown] for row in rows],
        frozenset(n for n, column in enumerate(shown) if column.right),
    )


def bundle(blocks: Sequence[Block], plain: str | None = None) -> dict[str, str]:
    """Return an output in every format; `plain` replaces the plain text made of the blocks."""
    text = text_of(blocks) if plain is None else plain
    return {
        "text/plain": text,
        "text/html": str(html(blocks)),
        "text/markdown": markdown(blocks),
        "text/latex": latex(text),
    }


# -- HTML ----------------------------------------------------------------------------------------------------------


def html(blocks: Iterable[Block]) -> Markup:
    """Return blocks as HTML that is complete by itself in a saved notebook."""
    body = Markup("\n").join(_html_block(block) for block in blocks)
    return Markup('<div class="makeway" dir="ltr" style="{}">{}</div>').format(_ROOT, body)


def safe(text: str) -> Markup:
    """Return text for HTML: escaped, on one line, in its own direction."""
    return escape(_OVERRIDES.sub("", _CONTROL.sub(" ", text)))


def _html_block(block: Block) -> Markup:
    match block:
        case Line(parts, space):
            style = Markup(' style="margin-top:{}px"').format(space) if space else Markup("")
            return Markup("<div{}>{}</div>").format(style, _html_cell(parts))
        case Banner(text, tone, status):
            role = Markup(' role="status"') if status else Markup("")
            return Markup('<div class="mw-banner" style="{}"{}>{}</div>').format(
                _BANNER.format(TONES[tone]), role, safe(text)
            )
        case Facts(rows):
            row = Markup('<div><span style="{}">{}:</span> {}</div>')
            return Markup("\n").join(row.format(SOFT, label, _html_cell(cell)) for label, cell in rows)
        case Table():
            return _html_table(block)
        case Drawing(drawn, _):
            return drawn


def _html_table(table: Table) -> Markup:
    """Return a table; its head is of plain cells with a role, because sanitizers do not keep `th` and `thead`."""

    def row(cells: Iterable[Markup], role: str) -> Markup:
        made = (
            Markup('<td{} style="{}">{}</td>').format(
                Markup(' role="{}"').format(role) if role else "", _NUMBER if n in table.right else _CELL, cell
            )
            for n, cell in enumerate(cells)
        )
        return Markup("<tr>{}</tr>").format(Markup("").join(made))

    head = row((Markup("<b>{}</b>").format(safe(name)) for name in table.head), "columnheader")
    rows = Markup("\n").join([head, *(row((_html_cell(cell) for cell in cells), "") for cells in table.rows)])
    return Markup('<table style="{}">{}</table>').format(_TABLE, rows)


def _html_cell(cell: Cell) -> Markup:
    parts = cell if isinstance(cell, tuple) else (cell,)
    return Markup(" ").join(shown for part in parts if (shown := _html_inline(part)))


def _html_inline(part: Inline) -> Markup:
    match part:
        case Bold(text):
            return Markup('<b dir="auto" style="unicode-bidi:isolate">{}</b>').format(safe(text))
        case Soft(text):
            return Markup('<span style="{}">{}</span>').format(SOFT, safe(text))
        case Code(text):
            return Markup('<code style="{}">{}</code>').format(_CODE, safe(text))
        case Chip(text, tone, dashed):
            colour = f";color:{TONES[tone]}" if tone else ""
            style = _CHIP + colour + (";border-style:dashed" if dashed else "")
            return Markup('<span style="{}">{}</span>').format(style, safe(text))
        case Drawing(drawn, _):
            return drawn
        case _:
            return safe(part)


# -- text ----------------------------------------------------------------------------------------------------------


def text_of(blocks: Iterable[Block]) -> str:
    """Return blocks as plain text, without control characters."""
    return "\n".join(shown for block in blocks if (shown := _text_block(block)))


def _text_block(block: Block) -> str:
    match block:
        case Line(parts, _):
            return plain(_text_cell(parts))
        case Banner(text, _, _):
            return plain(text)
        case Facts(rows):
            width = max((len(label) for label, _ in rows), default=0) + 2
            return "\n".join(f"  {label:<{width}}{plain(_text_cell(cell))}" for label, cell in rows)
        case Table(head, rows, right):
            shown = [n for n in range(len(head)) if not _only_drawn([row[n] for row in rows])]
            cells = [[_text_cell(row[n]) for n in shown] for row in rows]
            numbers = frozenset(at for at, n in enumerate(shown) if n in right)
            return aligned([[head[n].upper() for n in shown], *cells], numbers)
        case Drawing(_, text):
            return plain(text)


def _only_drawn(cells: Sequence[Cell]) -> bool:
    """Whether a column is of drawings for which no text stands."""
    return bool(cells) and all(isinstance(cell, Drawing) and not cell.text for cell in cells)


def _text_cell(cell: Cell) -> str:
    parts = cell if isinstance(cell, tuple) else (cell,)
    return " ".join(shown for part in parts if (shown := part if isinstance(part, str) else part.text))


def latex(text: str) -> str:
    """Return plain text as LaTeX."""
    return "\\begin{verbatim}\n" + text.replace("\\end{verbatim}", "\\end {verbatim}") + "\n\\end{verbatim}"


# -- Markdown ------------------------------------------------------------------------------------------------------


def markdown(blocks: Iterable[Block]) -> str:
    """Return blocks as Markdown, in which no text of users has a meaning of its own."""
    return "\n\n".join(shown for block in blocks if (shown := _markdown_block(block)))


def _markdown_block(block: Block) -> str:
    match block:
        case Line(parts, _):
            return _markdown_cell(parts)
        case Banner(text, _, _):
            return f"> {_escaped(text)}"
        case Facts(rows):
            return "\n".join(f"- {label}: {_markdown_cell(cell)}" for label, cell in rows)
        case Table(head, rows, right):
            lines = [[_escaped(name) for name in head], ["--:" if n in right else ":--" for n in range(len(head))]]
            lines += [[_markdown_cell(cell) for cell in row] for row in rows]
            return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        case Drawing(_, text):
            return _escaped(text)


def _markdown_cell(cell: Cell) -> str:
    parts = cell if isinstance(cell, tuple) else (cell,)
    return " ".join(shown for part in parts if (shown := _markdown_inline(part)))


def _markdown_inline(part: Inline) -> str:
    match part:
        case Bold(text):
            return f"**{shown}**" if (shown := _escaped(text)) else ""
        case Code(text):
            return f"`{plain(text).replace('`', ' ')}`".replace("|", "\\|")
        case str():
            return _escaped(part)
        case _:
            return _escaped(part.text)


def _escaped(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", plain(text).strip()).replace("\\<", "&lt;").replace("\\&", "&amp;")
