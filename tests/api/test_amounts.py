"""Amounts, durations and bars: one format for every surface."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makeway_api import bars
from makeway_api.durations import duration, parse_duration
from makeway_api.models import TeamUsage
from makeway_api.quantities import count, gpus, listed, memory, number, size

GPUS = st.integers(0, 40)


def team(**changes: object) -> TeamUsage:
    plain = {"reserved": 5, "limit": 9, "used": 9, "guaranteed": 4, "in_quota": 1, "borrowed": 4, "lent": 0, "free": 0}
    return TeamUsage.model_validate({"team": "rnd", "title": "R&D", **plain, **changes})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0 s"),
        (0, "0 s"),
        (0.04, "0 s"),
        (0.4, "0.4 s"),
        (0.97, "1 s"),
        (45, "45 s"),
        (59.7, "1 min"),
        (90, "1 min 30 s"),
        (600, "10 min"),
        (754, "12 min 34 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h"),
        (3659, "1 h"),
        (7500, "2 h 5 min"),
        (86_400, "1 d"),
        (273_600, "3 d 4 h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.integers(1, 10**8))
def test_a_duration_reads_back_within_its_smallest_unit(seconds: int) -> None:
    text = duration(seconds)
    smallest = {"s": 1, "min": 60, "h": 3600, "d": 86_400}
    shown = [(int(n), unit) for n, unit in zip(text.split()[::2], text.split()[1::2], strict=True)]
    total = sum(n * smallest[unit] for n, unit in shown)
    finest = {"s": 1, "min": 1, "h": 60, "d": 3600}[shown[0][1]]
    assert 0 <= seconds - total < finest


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), (" 90s", 90), ("30m", 1800), ("1h30m", 5400), ("1D", 86400)])
def test_durations_are_read(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "1x", "-5", "1.5h", "m"])
def test_what_is_no_duration_is_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(ValueError, match="write it like 90s, 30m, 2h, 1h30m or 1d"):
        parse_duration(text)


def test_amounts_have_their_units() -> None:
    assert [gpus(n) for n in (0, 0.5, 1, 2, 1.5)] == ["0 GPUs", "0.5 GPU", "1 GPU", "2 GPUs", "1.5 GPUs"]
    assert gpus(2, "virtual GPU") == "2 virtual GPUs"
    assert [number(n) for n in (2.0, 0.125, 1_000_000, 0.1 + 0.2)] == ["2", "0.125", "1,000,000", "0.3"]
    assert [count(1, "job"), count(0, "job"), count(2000, "policy", "policies")] == [
        "1 job",
        "0 jobs",
        "2,000 policies",
    ]
    assert [memory(n) for n in (512, 65_536, 1_572_864)] == ["512 MiB", "64 GiB", "1.5 TiB"]
    assert [size(n) for n in (12, 3_400, 50_000_000, 999_600, 12e9)] == [
        "12 bytes",
        "3.4 kB",
        "50 MB",
        "1.0 MB",
        "12 GB",
    ]
    assert [listed(["a"]), listed(["a", "b"]), listed("abcde", limit=3)] == ["a", "a and b", "a, b and 3 more"]
    assert listed([]) == ""


@given(GPUS, GPUS, GPUS, GPUS, GPUS, st.one_of(st.none(), st.integers(0, 200)))
def test_a_bar_shows_what_is_used_and_reserved_and_cuts_nothing_off(
    sessions: int, quota: int, borrowed: int, lent: int, free: int, limit: int | None
) -> None:
    used = sessions + quota + borrowed
    shown = team(
        guaranteed=sessions, in_quota=quota, borrowed=borrowed, used=used, lent=lent, free=free, limit=limit,
        reserved=sessions + quota + lent + free,
    )  # fmt: skip
    bar = bars.bar(shown, 100)
    assert sum(part.gpus for part in bar.parts) == used + lent + free
    at = 0.0
    for part in bar.parts:
        assert part.start == at
        at += part.gpus
    assert at <= bar.end
    assert bar.reserved <= bar.end
    assert bar.end >= (100 if limit is None else limit)
    assert bars.scale([bar], 300) * bar.end == pytest.approx(300 if bar.end else 0)


def test_a_bar_in_words() -> None:
    bar = bars.bar(team())
    assert bar.sentence == "R&D uses 9 GPUs; reserved 5, limit 9: 4 in sessions, 1 in quota, 4 borrowed."
    assert bar.summary == "9 in use · 5 reserved · limit 9"
    idle = bars.bar(team(used=0, guaranteed=0, in_quota=0, borrowed=0, reserved=0, limit=None))
    assert idle.sentence == "R&D uses 0 GPUs; reserved 0, no limit."
    assert bars.scale([idle], 300) == 0.0
    assert [part.tip for part in bar.parts] == ["4 GPUs in sessions", "1 GPU in quota", "4 GPUs borrowed"]


def test_bars_that_are_compared_share_one_scale() -> None:
    small, large = bars.bar(team(limit=10)), bars.bar(team(limit=20))
    assert bars.scale([small, large], 100) == 5
