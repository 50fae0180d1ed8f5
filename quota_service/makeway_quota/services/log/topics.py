"""Define the topics that an event stream subscribes to, so that a page is notified only of what it shows.

`cluster` is everything that the reader may see; `machines` adds, for administrators, the machines of deployments;
`team:NAME`, `job:ID` and `node:NAME` are one team, job or node; `policy` is the policy document.
"""

from __future__ import annotations

import re
from collections.abc import Set

from makeway_api.errors import MakewayError

from ...store.records import Event

MAX_TOPICS = 64
"""Topics of one stream, which all tabs of a browser share"""
MAX_LENGTH = 255
"""Characters of a topic"""
SINGLE_TOPICS = frozenset({"cluster", "machines", "policy"})
_NAMED = re.compile(r"(team|job|node):[^,\s]+")


def read_topics(text: str) -> frozenset[str]:
    """Return the topics of a comma-separated list, none for an empty one; MakewayError 422 for an unknown topic."""
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


def topics_of(event: Event) -> frozenset[str]:
    """Return the topics that an event is about."""
    if event.kind == "policy":
        return frozenset({"cluster", "machines", "policy"})
    result = {"cluster", "machines", f"team:{event.team}", f"job:{event.workload}"}
    result.update(f"node:{node}" for node in event.data.get("nodes") or ())
    return frozenset(result)


def affected_topics(topics: Set[str], event: Event) -> frozenset[str]:
    """Return which of a stream's topics an event may have changed."""
    if event.kind == "policy":
        return frozenset(topics)  # it may have changed any team, pool or title, and every page shows some
    result = topics_of(event) & topics
    if event.data.get("state") not in (None, "running"):  # it may have left any node, and the event does not name which
        result |= {topic for topic in topics if topic.startswith("node:")}
    return result
