"""Documents that differ from a valid one in a few places."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from makeway_quota import policy
from makeway_quota.policy import Document, Issue, PolicyInvalid

SAMPLE = Path(__file__).parents[2] / "hub_config" / "policy.yaml"
GOOD = """\
pools:
  - name: gpu
    size: 10
profiles:
  - name: gpu1
    gpus: 1
    pools: [gpu]
    policies: [rnd, devops]
policies:
  - name: rnd
    title: R&D
    groups: [rnd]
    quotas: [{reserved: 5, limit: 9}]
  - name: devops
    title: DevOps
    groups: [devops]
    quotas: [{reserved: 5, limit: 9}]
"""


@pytest.fixture
def sample() -> str:
    """Return the sample that a fresh Makeway starts with."""
    return SAMPLE.read_text("utf-8")


@pytest.fixture
def issues() -> Callable[..., list[Issue]]:
    """Return a function that reads an invalid document and returns its issues."""

    def find(text: str, **given: object) -> list[Issue]:
        with pytest.raises(PolicyInvalid) as caught:
            policy.read_policy(text, **given)  # type: ignore[arg-type]
        assert caught.value.issues
        return caught.value.issues

    return find


@pytest.fixture
def good() -> Callable[..., str]:
    """Return a function that replaces some texts of the valid document; each must occur exactly once."""

    def change(**replaced: str) -> str:
        text = GOOD
        for old, new in replaced.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text

    return lambda *pairs: change(**dict(pairs))


@pytest.fixture
def document() -> Document:
    """Return the valid document, read."""
    return policy.read_policy(GOOD)
