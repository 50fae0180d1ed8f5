"""Define the topics of a stream: what one page shows, so that its stream says only when that changed.

`cluster` is everything that the reader may see; `machines` is that, and for administrators the machines of
deployments; `team:NAME`, `job:ID` and `node:NAME` are one part of it, `policy` the policy document.
"""

from __future__ import annotations

import re
from collections.abc import Set

from makeway_api.errors import MakewayError

from ...store.records import Event

MAX_TOPICS = 64
"""Topics of one stream: all tabs of a browser share it"""
MAX_LENGTH = 255
"""Characters of a topic"""
SINGLE_TOPICS = frozenset({"cluster", "machines", "policy"})
_NAMED = re.compile(r"(team|job|node):[^,\s]+")


def read_topics(text: str) -> frozenset[str]:
    """Return the topics of a list with commas; MakewayError 422 for one that is not known. An empty list is none."""
    topics = frozenset(text.split(",")) if text else frozenset()
    for topic in sorted(topics):
        if len(topic) > MAX_LENGTH or not (topic in SINGLE_TOPICS or _NAMED.fullmatch(topic)):
            raise MakewayError(
                f"There is no topic {topic[:80]!r}; topics are cluster, machines, policy, team:NAME, job:ID and "
                "node:NAME.",
                code="unknown_topic",
                status=422,
            )
    if len(topics) > MAX_TOPICS:
        raise MakewayError(
            f"A stream has at most {MAX_TOPICS} topics, not {len(topics)}.",
            code="too_many_topics",
            status=422,
            numbers={"most": MAX_TOPICS, "asked": len(topics)},
        )
    return topics


def touched(event: Event) -> frozenset[str]:
    """Return the topics that an event is about."""
    if event.kind == "policy":
        return frozenset({"cluster", "machines", "policy"})
    result = {"cluster", "machines", f"team:{event.team}", f"job:{event.workload}"}
    result.update(f"node:{node}" for node in event.data.get("nodes") or ())
    return frozenset(result)


def hit(topics: Set[str], event: Event) -> frozenset[str]:
    """Return those of a stream's topics that an event is about."""
    if event.kind == "policy":
        return frozenset(topics)  # teams, pools and titles may be others: every page shows some of them
    result = touched(event) & topics
    if event.data.get("state") not in (None, "running"):  # it may have left any of the nodes that are watched
        result |= {topic for topic in topics if topic.startswith("node:")}
    return result
