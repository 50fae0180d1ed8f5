"""Represent the person or program behind a request, and what its scopes cover."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SCOPE = "custom:makeway:"


@dataclass(frozen=True, slots=True)
class Caller:
    """The user or program behind a request, as the Hub identifies it by its token.

    A scope may have a filter: `custom:makeway:manage!group=rnd` covers the teams of the Hub group `rnd`,
    `custom:makeway:submit!user=ana` the user ana. A scope with a filter is never taken for one without.
    """

    name: str
    admin: bool = False
    groups: frozenset[str] = frozenset()
    scopes: frozenset[str] = frozenset()
    kind: str = "user"

    @property
    def is_administrator(self) -> bool:
        """Whether the caller administers Makeway."""
        return self.admin or f"{SCOPE}admin" in self.scopes

    def holds(self, scope: str) -> bool:
        """Whether the caller has a scope of Makeway (`read`, `submit` …) without a filter, or for itself."""
        return f"{SCOPE}{scope}" in self.scopes or f"{SCOPE}{scope}!user={self.name}" in self.scopes

    def groups_with(self, scope: str) -> frozenset[str]:
        """Return the Hub groups that a scope is limited to, where it has a `!group=` filter."""
        prefix = f"{SCOPE}{scope}!group="
        return frozenset(held.removeprefix(prefix) for held in self.scopes if held.startswith(prefix))

    def manages(self, groups: Iterable[str]) -> bool:
        """Whether the caller administers Makeway or leads one of these Hub groups (`manage!group=…`)."""
        return self.manages_all or not self.groups_with("manage").isdisjoint(groups)

    @property
    def manages_all(self) -> bool:
        """Whether the caller may manage every team: an administrator, or the scope `manage` without a filter."""
        return self.is_administrator or f"{SCOPE}manage" in self.scopes
