"""Mutation tests: each wrong edit of the engine's rules fails another test of this folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True)
class Edit:
    """`new` instead of `old` (which occurs exactly once) in `file` breaks the rule `why`."""

    file: str
    old: str
    new: str
    why: str
    again: tuple[str, str, str] | None = None
    """(file, old, new) of a second place that has the rule, and that would keep it in force."""

    @property
    def changes(self) -> list[tuple[str, str, str]]:
        """Return every (file, old, new) of the edit."""
        return [(self.file, self.old, self.new), *([self.again] if self.again else [])]


EDITS = (
    # Accounting
    Edit(
        "snapshot.py",
        'else self.kind == "session"',
        'else self.kind == "job"',
        "sessions may never be stopped, jobs may",
    ),
    Edit(
        "index/ledger.py",
        "return amount <= account.unreserved(pool, non_preemptible)",
        "return amount < account.unreserved(pool, non_preemptible)",
        "work that fills the reservation exactly is in quota",
    ),
    Edit(
        "index/ledger.py",
        "return self.line.non_preemptible if non_preemptible else self.line.taken",
        "return self.line.taken",
        "a session's reservation is used up by sessions only",
    ),
    Edit(
        "index/ledger.py",
        "for level in self.chain if non_preemptible else () if nearest is None else (nearest,):",
        "for level in () if nearest is None else (nearest,):",
        "non-preemptible work is asked at every level",
    ),
    Edit(
        "index/ledger.py",
        "if promised and non_preemptible:",
        "if promised and not promised:",
        "what a department reserves for its teams' lines is not for others",
    ),
    Edit(
        "index/ledger.py",
        "return self.usage + self.nominated - self.moving",
        "return self.usage + self.nominated",
        "who moves counts once on its reservation",
    ),
    Edit(
        "index/ledger.py",
        "+ amount > (line.quota.limit or 0):",
        "> (line.quota.limit or 0):",
        "a limit is hard: what asks counts",
    ),
    Edit(
        "index/ledger.py",
        "used = line.future_usage if in_future else max(line.usage, line.future_usage)",
        "used = line.usage",
        "nominations count on the limit",
    ),
    Edit(
        "index/ledger.py",
        "self.unlent = max(0, quota.reserved - (quota.reserved if quota.lend is None else quota.lend))",
        "self.unlent = 0",
        "a static quota is kept free of others",
    ),
    Edit(
        "placement/fit.py",
        "if _free_in(cluster, line.quota.pools, in_future) - amount < keep_free:",
        "if _free_in(cluster, line.quota.pools, in_future) < keep_free:",
        "what asks must leave the static quota of others",
    ),
    Edit(
        "placement/fit.py",
        "keep_free = min(kept_together([*within, *at_most_free]), keep_free + _free_in(cluster, pools, in_future))",
        "keep_free = kept_together([*within, *at_most_free])",
        "what is kept in other pools counts as far as those have free GPUs",
    ),
    Edit(
        "placement/fit.py",
        "other_pools = [line for line in ledger.unlent_lines if line.kept_free(in_future)",
        "other_pools = [line for line in () if line.kept_free(in_future)",
        "what is kept in other pools is not there for a static quota of all pools",
    ),
    Edit(
        "placement/fit.py",
        "not cluster.over_capacity(pool, amount, in_future)",
        "True",
        "the pool's capacity is never exceeded",
    ),
    Edit(
        "placement/fit.py",
        "return parts if spare.admits(parts) else",
        "return parts if True else",
        "work without GPUs that is never evicted leaves CPU to free guaranteed GPUs",
    ),
    Edit(
        "placement/spare.py",
        "self.times = (True,) if in_future else (False, True)",
        "self.times = (True,) if in_future else (False,)",
        "GPUs that are about to be free keep their CPU, too",
    ),
    Edit(
        "placement/spare.py",
        "return not loss or loss <= self._budgets[known]",
        "return not loss",
        "what no reservation guarantees keeps no CPU",
    ),
    Edit(
        "placement/spare.py",
        "losses = [(other.pool, self._loss(other, many, at), at) for other in node.host for at in self.times]",
        "losses = [(other.pool, self._loss(other, many, at), at) for other in (node,) for at in self.times]",
        "guaranteed GPUs of a machine's other pools keep their CPU",
    ),
    Edit(
        "index/hosts.py",
        "cpu < workers * need.cpu",
        "cpu < 0",
        "work beside a pool makes way for the CPU of a guaranteed start",
    ),
    Edit(
        "index/hosts.py",
        "return self.pods or bool((self.cpu and need.cpu) or (self.memory and need.memory))",
        "return self.pods or bool(self.cpu and need.cpu)",
        "work beside a pool makes way for memory, too",
    ),
    Edit(
        "index/ledger.py",
        "                lines = tuple([line for line in lines if not line.quota.covers(own_pool)])",
        "                break",
        "a department keeps what it reserves in the pool of a victim",
    ),
    Edit(
        "cycle/nominations.py",
        "pools = group.pools if group.may_borrow and not (workload.nomination or contested) else in_quota",
        "pools = group.pools if group.may_borrow else in_quota",
        "who replaced a start waits for its own GPUs",
    ),
    Edit(
        "cycle/nominations.py",
        "contested = workload.id in replaced or any(",
        "contested = any(",
        "whose start was replaced waits for its own GPUs",
    ),
    # Order
    Edit(
        "rules/order.py",
        "(not group.nominated, last, *rank(group, pool), shares, -group.priority)",
        "(not group.nominated, last, shares, -group.priority)",
        "ranks go before fairness",
    ),
    Edit(
        "rules/order.py",
        "pool.rank.get(group.profile.name, len(pool.rank)),",
        "0,",
        "the pool's order of profiles decides",
    ),
    Edit(
        "rules/order.py",
        "-group.account.team.priority,",
        "group.account.team.priority,",
        "high priority teams go first",
    ),
    Edit(
        "rules/order.py",
        "shares, -group.priority)",
        "shares, group.priority)",
        "high priority work goes first",
    ),
    Edit(
        "rules/order.py",
        "if cluster.settings.user_fairness else 0",
        "if False else 0",
        "users of a team take rounds",
    ),
    Edit(
        "rules/order.py",
        'last = over_quota and account.team.weight == "Lowest"',
        "last = False",
        "Lowest takes only what no other workload can use",
    ),
    Edit("weights.py", "amount * (_SCALE // number)", "amount * number", "who has more weight may borrow more"),
    Edit(
        "index/ledger.py",
        "self.over_quota_use(pool) + self.team.history",
        "self.over_quota_use(pool)",
        "past use counts",
    ),
    # Victims
    Edit(
        "index/ledger.py",
        "(extra if ln.quota.covers(own_pool) else 0) > ln.quota.reserved",
        "(extra if ln.quota.covers(own_pool) else 0) >= ln.quota.reserved",
        "a team at its reservation keeps what it has",
    ),
    Edit(
        "index/ledger.py",
        "extra = amount if level in preemptor.chain else 0",
        "extra = 0",
        "the preemptor's own need counts first",
    ),
    Edit(
        "rules/victims/preemptor.py",
        "if victim.non_preemptible:",
        "if False:",
        "sessions are never victims",
    ),
    Edit(
        "rules/victims/preemptor.py",
        'if self.workload.kind == "job" and self.cluster.protecting and self.cluster.is_protected(victim):',
        "if self.cluster.is_protected(victim):",
        "min_runtime protects from jobs, not from sessions",
    ),
    Edit(
        "index/cluster_state.py",
        "return self.priority(workload) < priority\n",
        "return self.priority(workload) <= priority\n",
        "only a higher priority preempts in the team",
    ),
    Edit(
        "rules/victims/preemptor.py",
        "        -(cluster.now if started is None else started),\n",
        "        cluster.now if started is None else started,\n",
        "who started last leaves first",
    ),
    Edit(
        "rules/victims/preemptor.py",
        "-account.share(pool.pool.name),",
        "0,",
        "who is most over its share leaves first",
    ),
    Edit(
        "rules/victims/preemptor.py",
        "(cluster.now - max(since))",
        "(cluster.now - min(since))",
        "work that was saved is not lost",
    ),
    Edit(
        "rules/victims/preemptor.py",
        "return account is not self.account and pool == own_pool and self._above_fair_share(account)",
        "return account is not self.account",
        "fair share: only from those who are above theirs",
    ),
    Edit(
        "rules/fair_share.py",
        "(request if a is preemptor else 0)",
        "0",
        "the request counts where the fair share is computed",
    ),
    Edit(
        "rules/victims/preemptor.py",
        'if "own_team_any_priority" in self.rights and account is self.account:',
        'if "own_team_any_priority" in self.rights and not account:',
        "non-preemptible work may evict its own team's jobs",
    ),
    Edit(
        "index/ledger.py",
        "rest, default=-1)",
        "rest, default=0)",
        "work without GPUs is not in quota by that alone",
    ),
    Edit(
        "rules/victims/preemptor.py",
        "self._beyond = {name: covering for name, covering in reached.items() if covering}",
        "self._beyond = {}",
        "a limit may be in the way by what runs in another pool",
    ),
    Edit(
        "index/cluster_state.py",
        "return self.shrunk.get(allocation.workload.id)",
        "return None",
        "a gang that gave up a worker in a plan may give up the next one",
    ),
    Edit(
        "index/cluster_state.py",
        "return None if keeps else allocation",
        "return allocation",
        "no plan withdraws a nomination that it can keep",
    ),
    Edit(
        "cycle/admission.py",
        "        if not choice.victim_returns:",
        "        if True:",
        "the first pool where a set without a returning member makes room",
    ),
    Edit(
        "cycle/sparing.py",
        "return [old, *(pool for pool in able if pool is not old)]",
        "return [old]",
        "a victim is spared where a preemptor may start in another pool",
    ),
    Edit(
        "rules/victims/rights.py",
        'rights = (*rights, "fair_share")',
        'rights = rights or ("fair_share",)',
        "over quota all rights are compared together",
    ),
    Edit(
        "rules/victims/sets.py",
        "for v in losing], sum([v.milli_gpus for v in losing])\n",
        "for v in losing], 0\n",
        "the node where the fewest GPUs have to leave",
    ),
    Edit(
        "rules/victims/sets.py",
        "return _cost_of([v for v in victims if v.loses])",
        "return _cost_of([v for v in victims if v.kind != WITHDRAW])",
        "what has not run yet counts as no GPUs",
    ),
    Edit(
        "schedule.py",
        "if not cancel_needless_evictions(builder, withdrawn_evictions) and not relocate",
        "if not relocate",
        "an eviction that became superfluous is withdrawn",
    ),
    Edit(
        "schedule.py",
        "if not cancel_needless_evictions(builder, withdrawn_evictions) and not relocate(builder, groups):",
        "if not cancel_needless_evictions(builder, withdrawn_evictions):",
        "a victim that fits into what the plan leaves free is moved there",
    ),
    Edit(
        "cycle/sparing.py",
        "if eviction not in withdrawn_evictions",
        "if eviction[0] not in {name for name, _, _ in withdrawn_evictions}",
        "a victim is spared from each eviction that became superfluous",
    ),
    Edit(
        "cycle/admission.py",
        "if (in_quota or over_quota) and",
        "if (in_quota or group.may_borrow) and",
        "work that evicts in quota starts in quota, else two starts of a plan replace each other for ever",
    ),
    Edit(
        "cycle/admission.py",
        "if (in_quota or over_quota) and start_beside_hold(builder, group, workload, pool, parts, not in_quota):",
        "if (in_quota or over_quota) and try_start(builder, group, workload, pool, parts, in_quota):",
        "a preemptor over quota does not delay a workload that waited too long in another pool",
    ),
    Edit(
        "cycle/nominations.py",
        "start_beside_hold(builder, group, workload, pool, nominated, True)",
        "try_start(builder, group, workload, pool, nominated, False)",
        "a nominated workload over quota does not delay a workload that waited too long in another pool",
    ),
    Edit(
        "cycle/nominations.py",
        "return is_still_free(nominated, group) and try_start(",
        "return False and try_start(",
        "a nominated workload over quota starts on its own free GPUs, whomever others are held for",
    ),
    Edit(
        "cycle/rounds.py",
        "start_nominated(self.cluster, builder, True)",
        "start_nominated(self.cluster, builder, False)",
        "a nominated workload over quota starts on other GPUs once they are no longer held",
    ),
    Edit(
        "rules/reclaim.py",
        'if back == "none":',
        "if True:",
        "no victim returns at once by evicting another",
    ),
    Edit(
        "rules/victims/returning.py",
        'back = how == "none" and _evicts_later(',
        'back = False and how == "none" and _evicts_later(',
        "nor by evicting what it made way for",
    ),
    Edit(
        "rules/victims/returning.py",
        'return "in_quota" if in_quota else "others"',
        'return "others"',
        "over quota nothing is evicted that would return in quota",
    ),
    Edit(
        "index/ledger.py",
        "held = sum([n for name, n in moving if line.quota.covers(name)])",
        "held = sum([n for name, n in moving if name == pool])",
        "who moves from one pool to another counts once on a line over both",
    ),
    Edit(
        "cycle/relocation.py",
        "return find_placement(pool, group.need, True) if in_future else ()",
        "return ()",
        "nothing starts where a victim in quota returns",
    ),
    Edit(
        "cycle/relocation.py",
        "for leaving in (False, True)",
        "for leaving in (False,)",
        "nothing starts where a victim over quota would return by evicting it",
    ),
    Edit(
        "cycle/relocation.py",
        "find_placement(pool, group.need) or _beside_workers_that_stay(cluster, workload, pool)",
        "find(pool, group.need)",
        "a gang goes on beside those of its workers that can stay",
    ),
    Edit(
        "cycle/relocation.py",
        "[start for start in withdrawn if _could_evict_from(builder, start, victim)]",
        "[]",
        "a start that could evict a victim again does not make way for it",
    ),
    Edit(
        "cycle/relocation.py",
        "staying += _made_candidates(builder, withdrawn, workload)",
        "pass",
        "a start does not make way where its team's work was evicted only because of it",
    ),
    Edit(
        "plan_builder.py",
        "a.stuck and a.is_in(pool)]",
        "a.stuck and a.pool is pool]",
        "a stuck gang over two pools counts in both of them",
    ),
    Edit(
        "rules/consolidation.py",
        "if fewer.parts and _room(",
        "if False and _room(",
        "only the workers of a gang that must move",
    ),
    Edit(
        "rules/consolidation.py",
        "if evicted or allocation.started_in_plan or victim.non_preemptible or victim.kind",
        "if evicted or allocation.started_in_plan or victim.kind",
        "sessions are not moved",
    ),
    Edit(
        "cycle/admission.py",
        "            change = consolidate(preemptor)\n",
        "            change = None if group else consolidate(preemptor)\n",
        "moving is better than stopping",
    ),
    Edit(
        "cycle/serving.py",
        "if not group.total or group.reclaim_deferred or (over",
        "if not group.total or (over",
        "reclaim_after waits before anybody is evicted",
    ),
    Edit(
        "rules/consolidation.py",
        "    return _for_a_gang(preemptor,",
        "    return None and _for_a_gang(preemptor,",
        "jobs move over for gangs, too",
    ),
    Edit(
        "rules/consolidation.py",
        "        return allocation.started_in_plan and not evicted",
        "        return False",
        "what starts in a plan is put elsewhere, not moved later",
    ),
    Edit(
        "rules/hold.py",
        "other.priority > group.priority",
        "other.priority > group.priority + 9",
        "nothing is held for who would be preempted by its own team",
    ),
    Edit(
        "rules/hold.py",
        "cap < group.need.total",
        "cap < 0",
        "nothing is held for what can never start",
    ),
    Edit(
        "rules/victims/sets.py",
        "for _, gone in shrinks if gone)",
        "for _, gone in shrinks if False)",
        "elastic gangs shrink before they are stopped",
    ),
    Edit(
        "rules/victims/sets.py",
        "if len(stay) >= min_workers else ()",
        "if stay else ()",
        "no gang goes on with fewer than its least number of workers",
    ),
    # Placement
    Edit(
        "index/nodes.py",
        "suited = self.usable and (not need.models",
        "suited = (not need.models",
        "cordoned and lost nodes take nothing",
    ),
    Edit(
        "placement/fit.py",
        "return tuple(parts) if len(parts) == need.min_workers else ()",
        "return tuple(parts)",
        "gangs are all or nothing",
    ),
    Edit(
        "index/nominations.py",
        "        if fits_later(parts, need):\n            cluster.nominate(workload, need, parts)\n",
        "",
        "nothing else takes nominated GPUs",
    ),
    Edit(
        "index/allocations.py",
        "        _place_foreign(node)\n",
        "",
        "what foreign pods hold does not exist",
    ),
    Edit(
        "cycle/serving.py",
        "p for p in group.pools if p in eligible_pools or nomination_outlives_quota(group, nominated, p)",
        "p for p in eligible_pools",
        "a session's nomination stands",
    ),
    Edit(
        "cycle/serving.py",
        "p for p in group.pools if p in eligible_pools or nomination_outlives_quota(group, nominated, p)",
        "p for p in eligible_pools or [p for p in group.pools if nomination_outlives_quota(group, nominated, p)]",
        "a nomination stands where its workload is in quota in another pool by now",
    ),
    Edit(
        "cycle/sparing.py",
        "for places in every.places(known.search):",
        "for places in ():",
        "a victim is spared where its preemptors have room in other places only",
    ),
    Edit(
        "cycle/sparing.py",
        "return room < sum(",
        "return room <= sum(",
        "a victim is spared where there is just room for all",
    ),
    Edit(
        "cycle/sparing.py",
        "if _overbooked(builder, victim):",
        "if False:",
        "no victim is spared whose CPU is promised to a nomination",
    ),
    Edit(
        "cycle/rounds.py",
        " and _what_is_held(builder) == held:",
        ":",
        "what is held no longer may be used at once",
    ),
    Edit(
        "index/ledger.py",
        "self.future_usage - self.booting if in_future",
        "self.future_usage if in_future",
        "nothing of a static quota is lent for a node that boots",
    ),
    Edit(
        "index/ledger.py",
        "return self.future_usage - self.awaiting",
        "return self.future_usage",
        "nothing is evicted for a node that boots",
    ),
    Edit(
        "schedule.py",
        "    cancel_moves_to_same_place(builder)\n",
        "",
        "what would move to where it is stays",
    ),
    Edit(
        "cycle/rounds.py",
        ' or cluster.settings.fair_share == "reclaim":',
        ":",
        "a start beyond the fair share makes its team's work reclaimable",
    ),
    Edit(
        "cycle/rounds.py",
        "return not (cluster.terminating or cluster.late.nodes or builder.evicted or builder.moved)",
        "return True",
        "who loses what was on its way to be free may stop its own team's work",
    ),
    Edit(
        "cycle/unschedulable.py",
        "self.holding_groups = {hold.group.number for hold in builder.holds.values()}",
        "self.holding_groups: set[int] = set()",
        "who waited too long asks its own team past its hold",
    ),
    Edit(
        "cycle/unschedulable.py",
        "return hold is not None and not (hold.in_force and hold.until is None)",
        "return False",
        "what ends in time may use what is held",
    ),
    Edit(
        "index/allocations.py",
        "if not same or _counts_as(workload) != _counts_as(old) or",
        "if not same or",
        "who changes its team between two plans counts on the new one",
    ),
    Edit(
        "index/allocations.py",
        "    for allocation in [allocation for name, allocation in cluster.fresh.items() if name not in kept]:\n"
        "        cluster.withdraw(allocation)\n",
        "",
        "a start that did not come about takes no room",
    ),
    Edit(
        "cycle/unschedulable.py",
        "        return group.reclaim_deferred or not self._may_evict(group)",
        "        return True",
        "a team's higher priority stops its lower one",
    ),
    Edit(
        "cycle/growth.py",
        "if allocation.pool.pool.name not in wanted:",
        "if wanted is not None:",
        "gangs grow only where no workload in quota waits",
    ),
    Edit(
        "cycle/scaling.py",
        "max(0, self.pool.pool.max_nodes - len(self.pool.nodes))",
        "self.pool.pool.max_nodes + 1",
        "pools grow within their budget",
    ),
)
ROOT = Path(__file__).resolve().parents[2]
LAST = ("test_second_opinion.py", "test_invariants.py", "test_holds.py")
"""The slowest tests, run last: most edits fail an earlier one."""


def broken(edit: Edit | None, place: Path) -> Path:
    """Copy the packages and break one rule in the copy (None: leave it whole)."""
    for package in ("makeway_api", "makeway_quota"):
        source = ROOT / "quota_service" / package
        shutil.copytree(source, place / package, ignore=shutil.ignore_patterns("__pycache__", "web"))
    if edit is None:
        return place
    for name, old, new in edit.changes:
        file = place / "makeway_quota" / "engine" / name
        text = file.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"engine/{name} has changed; say anew how to break: {edit.why}"
        file.write_text(text.replace(old, new), encoding="utf-8")
    return place


def caught_by(edit: Edit | None, place: Path) -> str | None:
    """Return the first test that fails on the broken engine; None if all pass."""
    here = Path(__file__).parent
    tests = [file for file in here.glob("test_*.py") if file.name != Path(__file__).name]
    tests.sort(key=lambda file: (LAST.index(file.name) if file.name in LAST else -1, file.name))
    path = os.pathsep.join([str(broken(edit, place)), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", "--tb=line", "-n0"]
    command = [sys.executable, "-m", "pytest", *options, *map(str, tests)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0].split()[1] if failed else None


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[Edit | None, Future[str | None]]:
    """Try all edits, two at a time; and none."""
    pool = ThreadPoolExecutor(2)
    return {edit: pool.submit(caught_by, edit, tmp_path_factory.mktemp("broken")) for edit in (None, *EDITS)}


def test_there_are_enough_edits() -> None:
    assert len({(edit.file, edit.old, edit.new) for edit in EDITS}) == len(EDITS) >= 30
    for edit in EDITS:
        for name, old, _ in edit.changes:
            text = (ROOT / "quota_service" / "makeway_quota" / "engine" / name).read_text(encoding="utf-8")
            assert text.count(old) == 1, f"engine/{name} has changed; say anew how to break: {edit.why}"


@pytest.mark.mutations
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_copy_that_is_whole_passes(verdicts: dict[Edit | None, Future[str | None]]) -> None:
    assert verdicts[None].result() is None


@pytest.mark.mutations
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.why.replace(" ", "-"))
def test_a_wrong_edit_is_caught(edit: Edit, verdicts: dict[Edit | None, Future[str | None]]) -> None:
    assert verdicts[edit].result(), f"No test notices: {edit.why} ({edit.file}: {edit.new.strip()})"
