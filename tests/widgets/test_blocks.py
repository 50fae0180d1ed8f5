"""One source for every front end: HTML that needs no styles, Markdown, LaTeX and text; user input means nothing."""

from __future__ import annotations

import re

import pytest
from makeway import blocks, view, words
from makeway.blocks import Banner, Block, Bold, Chip, Code, Facts, Soft, Table, line
from samples import EVIL, NOW, job

NAMES = [
    EVIL,
    "a|b",
    "*bold* _it_ `code` # x",
    "$x^2$ & co",
    "[link](http://x)",
    "\\end{verbatim}\\input{/etc/passwd}",
    "x\u202egnp.exe",
    "שלום 12:30",
    "line\nbreak",
    "a\u2028b",
    "",
]


def everything(name: str) -> list[Block]:
    return [
        Banner(name),
        line(Bold(name), Chip(name, "good"), Soft(name), Code(name), name),
        Facts([("Why", name)]),
        Table(("A", "B"), [(name, (Bold(name), Code(name)))], frozenset({1})),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_no_name_means_anything_in_any_format(name: str) -> None:
    shown = blocks.bundle(everything(name))
    assert set(shown) == {"text/plain", "text/html", "text/markdown", "text/latex"}
    assert "<img" not in shown["text/html"]
    assert not re.search("[\u202e\u2066\u2028\x1b]", "".join(shown.values()))
    assert shown["text/latex"].count("\\end{verbatim}") == 1
    table = [row for row in shown["text/markdown"].splitlines() if row.startswith("|")]
    assert [len(re.findall(r"(?<!\\)\|", row)) for row in table] == [3, 3, 3]
    outside = re.sub(r"`[^`]*`", "", shown["text/markdown"])
    assert not re.search(r"(?<!\\)[$\[_]", outside)
    assert "<" not in outside


def test_words_stay_apart_where_every_element_is_removed() -> None:
    """Untrusted notebooks and sanitizers may leave nothing but the text."""
    for shown in (view.job_card(job(), NOW), view.jobs_table([job()], NOW), blocks.html(everything("word"))):
        text = re.sub(r"</t[dr]>|</div>", "\n", str(shown))
        assert not re.search(r"wordword|R&amp;D[a-z]|\dj-1|mnist[^\s<']", re.sub(r"<[^>]+>", "", text))


def test_every_column_has_a_head() -> None:
    """A screen reader names a cell by it."""
    for shown in (view.jobs_block([job()], NOW), view.jobs_block([job()], None, owner=True)):
        assert all(shown.head)
        assert all(len(row) == len(shown.head) for row in shown.rows)


def test_a_page_written_from_right_to_left_does_not_turn_times_around() -> None:
    shown = str(blocks.html([line(Bold("שלום"), "until 12:30:05 UTC")]))
    assert 'dir="ltr"' in shown
    assert '<b dir="auto" style="unicode-bidi:isolate">שלום</b>' in shown


@pytest.mark.parametrize(
    ("zone", "text"), [("UTC", "12:00:00 UTC"), ("Asia/Tokyo", "21:00:00 JST"), ("Asia/Dubai", "16:00:00 UTC+04")]
)
def test_times_name_their_zone(zone: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert words.clock(NOW) == text
        assert words.full_clock(NOW) == f"2026-01-01 {text}"
        assert words.day_clock(NOW).endswith(text.split()[1])
    finally:
        monkeypatch.undo()
        time.tzset()
