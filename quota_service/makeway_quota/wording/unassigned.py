"""Describe the GPUs of a cluster's nodes that no pool takes, for the panel, `makeway-quota nodes` and `doctor`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from makeway_api.quantities import listed

Offered = Iterable[tuple[str, int]]
"""Amounts by resource."""


def unassigned_sentences(nodes: Mapping[str, Offered]) -> list[str]:
    """Return one sentence for each resource that no pool takes; `nodes` has by name what is not taken of each node.

    Sorted by resource; empty where pools take everything.
    """
    result: dict[str, dict[str, int]] = {}
    for name, offered in sorted(nodes.items()):
        for resource, many in offered:
            result.setdefault(resource, {})[name] = many
    return [_sentence(resource, by_node) for resource, by_node in sorted(result.items())]


def _sentence(resource: str, by_node: Mapping[str, int]) -> str:
    total = f"{sum(by_node.values()):,}"
    nodes = "this node has" if len(by_node) == 1 else "these nodes have"
    return (
        f"No pool takes {total} {resource} of {listed(by_node)}: add a pool with this resource whose labels "
        f"{nodes}, or change the labels."
    )
