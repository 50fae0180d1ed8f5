"""Describe a text by the lines that it has in common with an earlier one, so that only what changed is sent.

Edits are a list: `[first, count]` stands for lines of the earlier text, from 0 on, and a text for new lines. Lines
that moved are found, too. It takes time in proportion to the lines; it is small, not the smallest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

Edit = list[int] | str


def edits(before: Sequence[str], after: Sequence[str]) -> list[Edit]:
    """Return how `after` is made of `before`: the runs of its lines, and between them the new lines."""
    where: defaultdict[str, list[int]] = defaultdict(list)
    for at, line in enumerate(before):
        where[line].append(at)
    made: list[Edit] = []
    fresh: list[str] = []
    first, end, expected = 0, 0, 0  # of the run under way (none: first == end), and where the next line may be
    for line in after:
        place = _place(where, before, line, end if end > first else expected)
        if place is None:
            if end > first:
                made.append([first, end - first])
                first = end
            fresh.append(line)
            expected += 1
            continue
        if end > first and place == end:
            end, expected = end + 1, end + 1
            continue
        if end > first:
            made.append([first, end - first])
        if fresh:
            made.append("\n".join(fresh))
            fresh = []
        first, end, expected = place, place + 1, place + 1
    if end > first:
        made.append([first, end - first])
    if fresh:
        made.append("\n".join(fresh))
    return made


def apply_edits(before: Sequence[str], made: Sequence[Edit]) -> list[str]:
    """Return the text that edits make of an earlier one: what the script of the page does."""
    after: list[str] = []
    for edit in made:
        after += edit.split("\n") if isinstance(edit, str) else before[edit[0] : edit[0] + edit[1]]
    return after


def _place(where: dict[str, list[int]], before: Sequence[str], line: str, expected: int) -> int | None:
    """Return the line of the earlier text that is the same: the expected one, else the next one, else any."""
    if expected < len(before) and before[expected] == line:
        return expected
    result = where.get(line)
    if not result:
        return None
    return result[min(bisect_left(result, expected), len(result) - 1)]
