"""Account for reservations, limits, lending and over-quota use (rule 2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from functools import cached_property
from typing import NamedTuple

from ..plan import LineUsage
from ..snapshot import QuotaLine, TeamQuota
from ..weights import over_per_weight
from .nodes import Allocation


class LineState:
    """One quota line and what it counts now. All amounts are milli-GPUs.

    `usage` is what admitted work holds, `terminating` the part of it that was evicted, `nominated` what pending
    work is nominated for, `moving` the part of that which the workload still holds elsewhere until it moves,
    `awaiting` the part of it of work that waits for nodes which boot, `booting` what that will have on these,
    `non_preemptible` what non-preemptible work holds or is nominated for.
    """

    __slots__ = (
        "account",
        "allocations",
        "awaiting",
        "booting",
        "changes",
        "moving",
        "nominated",
        "non_preemptible",
        "quota",
        "reported",
        "terminating",
        "unlent",
        "usage",
    )

    def __init__(self, account: Account, quota: QuotaLine) -> None:
        self.account, self.quota = account, quota
        self.usage = self.terminating = self.nominated = self.moving = self.awaiting = self.booting = 0
        self.non_preemptible = 0
        self.unlent = max(0, quota.reserved - (quota.reserved if quota.lend is None else quota.lend))
        self.allocations: dict[str, Allocation] = {}
        """The allocations that it counts, where it has a limit: forecasts read their ends."""
        self.changes = 0
        """The number of changes to them."""
        self.reported: LineUsage | None = None
        """The usage as last reported; None once it has changed."""

    @property
    def future_usage(self) -> int:
        """Return the usage once terminating work is gone and nominated work runs."""
        return self.usage - self.terminating + self.nominated

    @property
    def certain(self) -> int:
        """Return the future usage without work that waits for nodes which boot: it makes no work a candidate."""
        return self.future_usage - self.awaiting

    @property
    def taken(self) -> int:
        """Return how much of the reservation is taken; a job that moves counts once, with the larger placement."""
        return self.usage + self.nominated - self.moving

    def see(self, name: str, allocation: Allocation | None) -> None:
        """Record that an allocation counts on this limit (None: no longer)."""
        self.changes += 1
        if allocation is None:
            del self.allocations[name]
        else:
            self.allocations[name] = allocation

    def kept_free(self, in_future: bool) -> int:
        """Return how much others must leave free now, or `in_future`; nothing is lent for a node that boots."""
        return max(0, self.unlent - (self.future_usage - self.booting if in_future else self.usage))


class Guarantee(NamedTuple):
    """What one line reserves for the work of an account, at one level of its chain.

    `beyond`: the part that a department reserves beyond its teams' own lines; work under such a line does not count.
    """

    line: LineState
    reserved: int
    beyond: bool = False

    def counts(self, account: Account, pool: str) -> bool:
        """Whether work of an account in a pool counts."""
        if self.line.account not in account.chain or not self.line.quota.covers(pool):
            return False
        below = account.chain[: account.chain.index(self.line.account)]
        return not self.beyond or not any(level.reserving(pool) for level in below)

    def used(self, non_preemptible: bool) -> int:
        """Return how much of it is taken: by non-preemptible work, or by all."""
        if not self.beyond:
            return self.line.non_preemptible if non_preemptible else self.line.taken
        return sum(
            taken[non_preemptible]
            for account in self.line.account.descendants
            for pool, taken in account.own.items()
            if self.counts(account, pool)
        )


class Account:
    """One team with its lines; `chain` is itself, its department, and so on up."""

    def __init__(self, team: TeamQuota) -> None:
        self.team = team
        self.lines = tuple(LineState(self, quota) for quota in team.quotas)
        self.parent: Account | None = None
        self.children: list[Account] = []
        self.own: dict[str, tuple[int, int]] = {}
        """Pool to what its own work takes there, without its teams': of all work, of non-preemptible work. Counted only
        where there are departments."""
        self.used_in_pool: dict[str, int] = {}
        self.used_by_owner: dict[str, int] = {}
        self._covering: dict[str, tuple[LineState, ...]] = {}
        self._reserving: dict[str, tuple[LineState, ...]] = {}
        self._limiting: dict[str, tuple[LineState, ...]] = {}
        self._guarantors: dict[str, Account | None] = {}
        self._guarantees: tuple[dict[str, tuple[Guarantee, ...]], dict[str, tuple[Guarantee, ...]]] = ({}, {})
        self._shares: dict[str, tuple[int, ...]] = {}
        self._unreserved: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._exceeds: dict[str, bool] = {}

    @cached_property
    def chain(self) -> tuple[Account, ...]:
        """Return the account and its departments, nearest first."""
        chain, at = [self], self.parent
        while at is not None and at not in chain:
            chain.append(at)
            at = at.parent
        return tuple(chain)

    @cached_property
    def is_limited(self) -> bool:
        """Whether it has a limit in any pool, or a department has."""
        return any(line.quota.limit is not None for level in self.chain for line in level.lines)

    @cached_property
    def covers_all(self) -> bool:
        """Whether each of its own lines counts usage in every pool."""
        return not any(line.quota.pools for line in self.lines)

    def covering(self, pool: str) -> tuple[LineState, ...]:
        """Return the own lines that count usage in `pool`."""
        known = self._covering.get(pool)
        if known is None:
            known = self._covering[pool] = tuple(line for line in self.lines if line.quota.covers(pool))
        return known

    def reserving(self, pool: str) -> tuple[LineState, ...]:
        """Return the own lines that reserve GPUs in `pool`."""
        known = self._reserving.get(pool)
        if known is None:
            known = self._reserving[pool] = tuple(line for line in self.covering(pool) if line.quota.reserved > 0)
        return known

    def limiting(self, pool: str) -> tuple[LineState, ...]:
        """Return the lines of the account and its departments that limit usage in `pool`, nearest first."""
        known = self._limiting.get(pool)
        if known is None:
            lines = (line for level in self.chain for line in level.covering(pool))
            known = self._limiting[pool] = tuple(line for line in lines if line.quota.limit is not None)
        return known

    def guarantor(self, pool: str) -> Account | None:
        """Return the account that reserves for this one in `pool`: itself, else the nearest department, else None."""
        if pool not in self._guarantors:
            self._guarantors[pool] = next((account for account in self.chain if account.reserving(pool)), None)
        return self._guarantors[pool]

    @cached_property
    def descendants(self) -> tuple[Account, ...]:
        """Return the account and all accounts below it."""
        accounts = [self]
        for account in accounts:
            accounts += [child for child in account.children if child not in accounts]
        return tuple(accounts)

    def guarantees(self, pool: str, non_preemptible: bool) -> tuple[Guarantee, ...]:
        """Return all that work in `pool` must stay within to be in quota; none: nothing is reserved.

        Non-preemptible work is asked at every level, since nothing that it takes comes back. Other work is asked at
        the nearest level that reserves: what other teams borrow of its team's reservation is reclaimed.
        """
        known = self._guarantees[non_preemptible].get(pool)
        if known is None:
            guarantees: list[Guarantee] = []
            own = False
            nearest = self.guarantor(pool)
            for level in self.chain if non_preemptible else () if nearest is None else (nearest,):
                for line in level.reserving(pool):
                    guarantees.append(Guarantee(line, line.quota.reserved))
                    promised = 0 if own else level.promised(line.quota)
                    if promised and non_preemptible:
                        guarantees.append(Guarantee(line, max(0, line.quota.reserved - promised), True))
                own = own or bool(level.reserving(pool))
            known = self._guarantees[non_preemptible][pool] = tuple(guarantees)
        return known

    def promised(self, quota: QuotaLine) -> int:
        """Return how much of one of its lines the nearest lines below it reserve."""
        total, seen, waiting = 0, {self}, list(self.children)
        while waiting:
            child = waiting.pop()
            if child in seen:
                continue  # teams that are each other's departments
            seen.add(child)
            own = reserved_within(child.team, quota)
            total += own
            waiting += () if own else child.children
        return total

    def tightest(self, pool: str, non_preemptible: bool) -> Guarantee | None:
        """Return the guarantee with the least left, the nearest of equal ones; None if nothing is reserved."""
        known = self.guarantees(pool, non_preemptible)
        return min(known, key=lambda g: g.reserved - g.used(non_preemptible), default=None)

    def over_quota_use(self, pool: str, request: int = 0, of: Account | None = None) -> int:
        """Return by how much its usage in `pool`, with a `request` of the account `of`, will exceed its reservation."""
        lines, more = self.reserving(pool), request if of is not None and self in of.chain else 0
        if not lines:
            used, guarantor = self.used_in_pool.get(pool, 0) + more, self.guarantor(pool)
            return used if guarantor is None else min(used, guarantor.over_quota_use(pool, request, of))
        return max(0, max(line.future_usage + more - line.quota.reserved for line in lines))

    def shares(self, pool: str) -> tuple[int, ...]:
        """Return the shares of the departments, from the top down, and its own; cached until the next record."""
        known = self._shares.get(pool)
        if known is None:
            known = self._shares[pool] = tuple(level._share(pool) for level in reversed(self.chain))
        return known

    def unreserved(self, pool: str, non_preemptible: bool) -> int:
        """Return how much it can still use in quota in `pool`: what is left at every level that reserves there.

        Negative when exceeded or when nothing is reserved. Cached until the next record.
        """
        known = self._unreserved[non_preemptible].get(pool)
        if known is None:
            rest = [g.reserved - g.used(non_preemptible) for g in self.guarantees(pool, non_preemptible)]
            known = self._unreserved[non_preemptible][pool] = min(rest, default=-1)
        return known

    def exceeds(self, pool: str) -> bool:
        """Whether its own usage will be above a reservation in `pool`, or it reserves nothing; cached as the shares."""
        known = self._exceeds.get(pool)
        if known is None:
            lines = self.reserving(pool)
            known = not lines or any(line.certain > line.quota.reserved for line in lines)
            self._exceeds[pool] = known
        return known

    def forget(self) -> None:
        """Drop the cached shares: usage or history has changed."""
        self._shares.clear()
        self._exceeds.clear()
        for known in self._unreserved:
            known.clear()

    def share(self, pool: str) -> int:
        """Return over-quota use and history per weight: the smaller, the earlier in the order."""
        return self.shares(pool)[-1]

    def _share(self, pool: str) -> int:
        return over_per_weight(self.over_quota_use(pool) + self.team.history, self.team.weight)


class Ledger:
    """All accounts, and the checks of a request against them."""

    def __init__(self, policies: Iterable[TeamQuota]) -> None:
        self.accounts = {team.name: Account(team) for team in policies}
        for account in self.accounts.values():
            if account.team.parent is not None:
                account.parent = self.accounts.get(account.team.parent)
            if account.parent is not None:
                account.parent.children.append(account)
        self.nested = any(account.parent for account in self.accounts.values())
        self._parents = frozenset(a.parent for a in self.accounts.values() if a.parent is not None)
        self.changed: list[Account] = []
        """The accounts whose usage or nominations changed, one entry for each time."""
        self._exceeding: dict[str, tuple[int, set[str]]] = {}
        """Pool to how many of these changes are in, and the names of the accounts beyond a reservation there"""
        self.lines = [(name, line) for name, account in sorted(self.accounts.items()) for line in account.lines]
        """All lines with the names of their teams, in the order of names."""
        self.unlent_lines = tuple(line for a in self.accounts.values() for line in a.lines if line.unlent)
        self.counts_twice = len({line.account for line in self.unlent_lines}) < len(self.unlent_lines)
        """Whether a start can count on several static quotas, so that other teams may use more GPUs after it."""

    @property
    def teams(self) -> list[Account]:
        """Return the accounts that are no department."""
        return [account for account in self.accounts.values() if account not in self._parents]

    def begin(self) -> None:
        """Start a decision: forget what changed in the last one."""
        self.changed.clear()
        self._exceeding.clear()

    def exceeding(self, pool: str) -> AbstractSet[str]:
        """Return the names of the accounts for which `Account.exceeds` holds in a pool, cached until these change."""
        seen, known = self._exceeding.get(pool, (0, None))
        if known is None or seen > len(self.changed):
            known = {name for name, account in self.accounts.items() if account.exceeds(pool)}
        else:
            for account in self.changed[seen:]:
                (known.add if account.exceeds(pool) else known.discard)(account.team.name)
        self._exceeding[pool] = len(self.changed), known
        return known

    def affected(self, account: Account) -> Iterable[Account]:
        """Return the accounts whose shares depend on one: itself, or all where there are departments."""
        return self.accounts.values() if self.nested else (account,)

    def account(self, name: str) -> Account:
        """Return a team's account; work of a deleted team counts on one that reserves nothing."""
        if name not in self.accounts:
            self.accounts[name] = Account(TeamQuota(name, weight="None"))
            self._exceeding.clear()
        return self.accounts[name]

    def record(
        self,
        account: Account,
        pool: str,
        non_preemptible: bool,
        owner: str,
        *,
        usage: int = 0,
        terminating: int = 0,
        nominated: int = 0,
        booting: int = 0,
        moving: tuple[tuple[str, int], ...] = (),
    ) -> None:
        """Add to every line of the account and its departments that covers the pool.

        `booting`: the part of `nominated` on nodes that boot. `moving`: what the workload holds in which pools until
        it moves to what it is nominated for.
        """
        later = usage - terminating + nominated
        if later:
            self.changed.append(account)
        for affected in self.affected(account):
            affected.forget()
        if self.nested:
            taken, guaranteed = account.own.get(pool, (0, 0))
            more = usage + nominated - _counted_twice(sum([n for name, n in moving if name == pool]), nominated)
            guaranteed += usage + nominated if non_preemptible else 0
            account.own[pool] = taken + more, guaranteed
        for level in account.chain:
            level.used_in_pool[pool] = level.used_in_pool.get(pool, 0) + later
            for line in level.lines if level.covers_all else level.covering(pool):
                line.usage += usage
                line.terminating += terminating
                line.nominated += nominated
                line.booting += booting
                line.awaiting += nominated if booting else 0
                if moving:
                    held = sum([n for name, n in moving if line.quota.covers(name)])
                    line.moving += _counted_twice(held, nominated)
                line.reported = None
                if non_preemptible:
                    line.non_preemptible += usage + nominated
        account.used_by_owner[owner] = account.used_by_owner.get(owner, 0) + later

    def in_quota(self, account: Account, pool: str, amount: int, non_preemptible: bool) -> bool:
        """Whether `amount` more stays within the reservation, counting all work or non-preemptible work alone.

        A request for no GPUs does so only where the usage stays within a reservation, not by itself (rule 2).
        """
        return amount <= account.unreserved(pool, non_preemptible)

    def over_limit(
        self,
        account: Account,
        pool: str,
        amount: int,
        in_future: bool = False,
        minus: Mapping[LineState, int] | None = None,
    ) -> LineState | None:
        """Return the first line whose limit `amount` more would exceed, nearest first; None if there is none.

        `in_future`: count the future only, without terminating work. `minus`: and without these amounts.
        """
        for line in account.limiting(pool):
            used = line.future_usage if in_future else max(line.usage, line.future_usage)
            if used - (minus.get(line, 0) if minus else 0) + amount > (line.quota.limit or 0):
                return line
        return None

    def above(
        self,
        account: Account,
        pool: str,
        preemptor: Account,
        own_pool: str,
        amount: int,
        gone: Mapping[LineState, int],
    ) -> bool:
        """Whether work of `account` in `pool` may be evicted for `preemptor`, which needs `amount` in `own_pool`.

        Every level from the victim up must be above its reservation, except by lines that only stand over
        both: there the preemptor's need changes nothing. `gone`: what the victims chosen so far count on the lines.
        """
        if not gone and not self.nested and account is not preemptor:
            return account.exceeds(pool)
        guarantor = preemptor.guarantor(own_pool) or preemptor
        shared = guarantor.chain[1:]
        for level in account.chain:
            lines = level.reserving(pool)
            if level in shared:
                if pool == own_pool:
                    break
                lines = tuple([line for line in lines if not line.quota.covers(own_pool)])
            if not lines:
                continue
            extra = amount if level in preemptor.chain else 0
            if not any(
                ln.certain - gone.get(ln, 0) + (extra if ln.quota.covers(own_pool) else 0) > ln.quota.reserved
                for ln in lines
            ):
                return False
        return True

    def unused(self, pool: str) -> int:
        """Return the milli-GPUs of a pool that reservations guarantee beyond what is used of them, now and later."""
        lines = ((account, account.reserving(pool)) for account in self.accounts.values())
        rest = {
            account: min(line.quota.reserved - max(line.usage, line.future_usage) for line in reserving)
            for account, reserving in lines
            if reserving
        }
        return together({account: amount for account, amount in rest.items() if amount > 0})

    def static_quotas(
        self, account: Account, pool: str, in_future: bool = False
    ) -> list[tuple[LineState, tuple[str, ...]]]:
        """Return the other teams' lines whose static quotas keep GPUs of `pool` free, with the pools they cover."""
        return [
            (line, line.quota.pools)
            for line in self.unlent_lines
            if line.kept_free(in_future) and line.quota.covers(pool) and line.account not in account.chain
        ]


def is_within(quota: QuotaLine, other: QuotaLine) -> bool:
    """Whether every pool that a line covers is covered by another line."""
    return not other.pools or (bool(quota.pools) and set(quota.pools) <= set(other.pools))


def reserved_within(team: TeamQuota, quota: QuotaLine) -> int:
    """Return what a team's own lines reserve of a department's line; one within another of them adds nothing."""
    within = [line for line in team.quotas if line.reserved > 0 and is_within(line, quota)]
    outer = [
        line for line in within if not any(is_within(line, other) and not is_within(other, line) for other in within)
    ]
    return sum({frozenset(line.pools): line.reserved for line in sorted(outer, key=lambda ln: -ln.reserved)}.values())


def kept_free(lines: Iterable[LineState], in_future: bool) -> int:
    """Return the milli-GPUs that static quotas keep free together."""
    return kept_together((line.account, line.kept_free(in_future)) for line in lines)


def kept_together(kept: Iterable[tuple[Account, int]]) -> int:
    """Return what is kept free for accounts, each for its own and as often as it is there, in milli-GPUs.

    A department and its teams keep the larger of what the department keeps and what its teams keep in sum: what is
    kept for a team is kept for its department, too.
    """
    own: dict[Account, int] = {}
    for account, amount in kept:
        own[account] = own.get(account, 0) + amount
    return together(own)


def together(own: Mapping[Account, int]) -> int:
    """Return what accounts keep together: of a department and its teams, the larger of its own part and their sum."""
    if all(account.parent is None for account in own):
        return sum(own.values())
    below: dict[Account | None, int] = {}
    levels = {level for account in own for level in account.chain}
    for account in sorted(levels, key=lambda level: -len(level.chain)):
        above = account.chain[1] if len(account.chain) > 1 else None
        below[above] = below.get(above, 0) + max(own.get(account, 0), below.get(account, 0))
    return below.get(None, 0)


def _counted_twice(held: int, nominated: int) -> int:
    """Return what counts in both places of a workload that moves; negative where its nomination is withdrawn."""
    return min(held, nominated) if nominated >= 0 else -min(held, -nominated)
