"""Numbers as people read them in messages: the services and the store say them as the engine does."""

from __future__ import annotations

import pytest
from makeway_quota.engine import phrases
from makeway_quota.wording import count, duration, gpus, names


def test_half_a_gpu_is_said_in_one_way_everywhere() -> None:
    assert [gpus(milli) for milli in (0, 500, 1000, 1500)] == ["0 GPUs", "0.5 GPU", "1 GPU", "1.5 GPUs"]
    assert gpus is phrases.gpus


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-5, "0 s"),
        (0.3, "0.3 s"),
        (45, "45 s"),
        (240, "4 min"),
        (7500, "2 h 5 min"),
        (7200, "2 h"),
        (259_200, "3 d"),
        (273_600, "3 d 4 h"),
    ],
)
def test_a_duration_is_said_in_its_two_largest_units(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_lists_end_with_and() -> None:
    assert names(["a"]) == "a"
    assert names(["a", "b", "c"]) == "a, b and c"
    assert names(list("abcdefg")) == "a, b, c, d, e and 2 more"
    assert names([]) == ""
    assert (count(1, "job"), count(2, "job")) == ("1 job", "2 jobs")
