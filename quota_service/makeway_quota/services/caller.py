"""Who asks, and what they may see."""

from __future__ import annotations

from dataclasses import dataclass

SCOPE = "custom:makeway:"


@dataclass(frozen=True, slots=True)
class Caller:
    """A person or a program that the Hub vouches for."""

    name: str
    admin: bool = False
    groups: frozenset[str] = frozenset()
    scopes: frozenset[str] = frozenset()
    kind: str = "user"

    @property
    def sees_all(self) -> bool:
        """True for administrators of Makeway."""
        return self.admin or f"{SCOPE}admin" in self.scopes

    def manages(self, groups: tuple[str, ...]) -> bool:
        """True for administrators and for leads of one of these Hub groups (`custom:makeway:manage!group=…`)."""
        manage = f"{SCOPE}manage"
        return self.sees_all or manage in self.scopes or any(f"{manage}!group={g}" in self.scopes for g in groups)
