"""Sentences for the engine's facts: one entry for each code.

State first, then the cause with its numbers. An unknown code is a KeyError; a test compares this table with the codes
that the engine has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from makeway_api.bars import WHEN_NEEDED
from makeway_api.durations import duration
from makeway_api.quantities import count, gpus, listed, memory, number

from ..engine.plan import Fact
from .machines import (
    machine_coming,
    machine_count,
    machine_offered,
    machine_on_its_way,
    next_launch,
    no_launch,
    no_machine,
    no_machine_offered,
)
from .naming import IDS, Names, kind_name

NO_DEADLINE_AFTER = 366 * 86_400.0
"""Seconds; what seems to be later than that had no deadline."""
FactValues = Mapping[str, Any]
Sentence = Callable[[FactValues, Names], str]


def sentence(facts: Sequence[Fact], names: Names = IDS) -> str:
    """Return the facts of a decision as text."""
    victims = _victims([fact.values for fact in facts if fact.code == "by_victim"], names)
    sentences = []
    for code, values in facts:
        if code in WITH_VICTIMS:
            sentences.append(WITH_VICTIMS[code](values, victims))
        elif code != "by_victim":
            sentences.append(SENTENCES[code](values, names))
    return " ".join(sentences)


def is_are(amount: float) -> str:
    """Return the verb for an amount of GPUs: `1 GPU is`, `0.5 GPU is`, `2 GPUs are`, `0 GPUs are`."""
    return "is" if 0 < amount <= 1 else "are"


def _victim(v: FactValues, names: Names) -> str:
    return f"{names.work(v['team'], v['kind'], v['victim'], v['owner'])} ({gpus(v['gpus'])})"


def _victims(victims: Sequence[FactValues], names: Names) -> str:
    """Return what makes way, and its verb, such as `R&D's job (1 GPU) makes way`; "" without victims.

    Those of other teams, which have no names, are counted: `2 of R&D's jobs (1 GPU each) make way`.
    """
    victims_by_text = Counter(
        (names.work(v["team"], v["kind"], v["victim"], v["owner"]), gpus(v["gpus"])) for v in victims
    )
    texts: list[str] = []
    for (work, amount), number_of in victims_by_text.items():
        is_unnamed = number_of > 1 and work.endswith(("'s job", "'s notebook"))
        texts += [f"{number_of} of {work}s ({amount} each)"] if is_unnamed else [f"{work} ({amount})"] * number_of
    return f"{listed(texts, limit=4)} {'makes' if len(victims) == 1 else 'make'} way" if texts else ""


def _preemptor(v: FactValues, names: Names) -> str:
    return names.work(v["team"], v["kind"], v["preemptor"], v["owner"])


def _needs(v: FactValues, names: Names) -> str:
    return f"{_preemptor(v, names)} needs {gpus(v['needs'])}"


def _pool(v: FactValues, names: Names) -> str:
    return f"pool {names.pool(v['pool'])}"


def _cpu_memory(v: FactValues) -> str:
    """Return an amount of CPU and memory: `8 cores and 64 GiB of memory`."""
    cores = f"{number(v['cpu'])} {'core' if v['cpu'] == 1 else 'cores'}" if v.get("cpu") else ""
    return listed(filter(None, (cores, f"{memory(v['memory'])} of memory" if v.get("memory") else "")))


def _request_of(v: FactValues) -> str:
    if not v["needs"]:
        per_node = f" on each of {v['workers']} nodes" if v["workers"] > 1 else ""
        return f"this {kind_name(v['kind'])} needs {_cpu_memory(v) or 'no GPU'}{per_node}"
    if v["workers"] == 1:
        return f"this {kind_name(v['kind'])} needs {number(v['each'])}"
    return f"this {kind_name(v['kind'])} needs {number(v['needs'])} ({v['workers']} × {number(v['each'])})"


def _order(v: FactValues, names: Names) -> str:
    last = "last started" if v["order"] == "newest" else "least work lost"
    return (
        f"{names.workload(v['victim'])} is first in the eviction order (lowest priority, most over its share, {last})"
    )


def _above_reservation(v: FactValues, names: Names) -> str:
    over = number(v["uses"] - v["reserved"])
    return (
        f"{names.team(v['victim_team'])} uses {gpus(v['uses'])}, {over} more than its {number(v['reserved'])} reserved"
    )


# -- starts ----------------------------------------------------------------------------------------------------


def _uses(v: FactValues, names: Names) -> str:
    team = names.team(v["team"])
    return f"{team}'s notebooks use" if v["by"] == "sessions" else f"{team} uses"


def _reserved(v: FactValues) -> str:
    return gpus(v["reserved"], "reserved GPU")


def _starts(v: FactValues, names: Names) -> str:
    """Return where a workload starts; lines of earlier releases name no pool."""
    return f"Starts on {listed(v['nodes'])}" + (f" of {_pool(v, names)}" if "pool" in v else "")


def _starts_in_quota(v: FactValues, names: Names) -> str:
    return f"{_starts(v, names)}: {_uses(v, names)} {number(v['uses'])} of its {_reserved(v)}."


def _starts_nominated(v: FactValues, names: Names) -> str:
    return (
        f"{_starts(v, names)}, where GPUs were set aside for it: {_uses(v, names)} {gpus(v['uses'])}, "
        f"more than the {number(v['reserved'])} reserved now."
    )


def _starts_over_quota(v: FactValues, names: Names) -> str:
    return (
        f"{_starts(v, names)}, over quota: {names.team(v['team'])} uses {gpus(v['uses'])} and has "
        f"{number(v['reserved'])} reserved; this workload makes way {WHEN_NEEDED}."
    )


# -- evictions -------------------------------------------------------------------------------------------------


def _yield_in_team(v: FactValues, names: Names) -> str:
    victim = f"this {kind_name(v['victim_kind'])} of the same team"
    return f"{_needs(v, names)}; {victim} ran for more than {duration(v['yields_after'])} and yields to it."


def _moves(v: FactValues, names: Names) -> str:
    verb = "moves" if v["moving"] == 1 else "move"
    whom = f"{v['moving']} of its {count(v['workers'], 'worker')} {verb}" if v["moving"] < v["workers"] else "Moves"
    places = f"from {listed(v['from'])} to {listed(v['to'])}"
    return f"{whom} {places}, so that {_preemptor(v, names)} fits; no job is stopped."


def _reclaiming(v: FactValues, victims: str) -> str:
    by = f"ready within {duration(v['within'])}" if v["within"] else "a little later than planned"
    ready = f"{gpus(v['needs'])} {is_are(v['needs'])} being freed for you, {by}"
    return f"{ready}: {victims}." if victims else f"{ready}."


def _stuck(v: FactValues, names: Names) -> str:
    what = f"a pod or process of {names.workload(v['workload'])}"
    if "team" in v:
        owner = f" of {v['owner']}" if v["owner"] else ""
        what = f"{names.team(v['team'])}'s {kind_name(v['kind'])} {names.workload(v['workload'])}{owner}"
    where = f" on {listed(v['nodes'], limit=4)}" if v["nodes"] else ""
    late = f", {duration(v['late'])} after its deadline" if v["late"] < NO_DEADLINE_AFTER else ""
    return f"{what[0].upper()}{what[1:]} does not end{where}{late}."


def _ready_after_reclaim(v: FactValues, victims: str) -> str:
    parts = [victims] if victims else []
    if v["moved"]:
        parts.append(f"{count(v['moved'], 'job')} {'moves' if v['moved'] == 1 else 'move'} to other GPUs")
    if v["shrunk"]:
        parts.append(f"{count(v['shrunk'], 'gang')} {'goes' if v['shrunk'] == 1 else 'go'} on with fewer workers")
    if parts and not victims:
        parts.append("no job is stopped")
    return (
        f"Ready in {duration(v['within'])} or less: {', '.join(parts) if parts else 'the GPUs are about to be free'}."
    )


# -- reasons to wait -------------------------------------------------------------------------------------------


def _guarantee_used(v: FactValues, names: Names) -> str:
    team, many = names.team(v["team"]), number(v["reserved"])
    guaranteed = {
        "department": f"the {many} guaranteed GPUs of {team}, your department,",
        "rest": f"the {many} GPUs that {team} guarantees beyond those of its teams",
    }.get(v.get("level", ""), f"your {many} guaranteed GPUs")
    used = f"{number(v['guaranteed_in_use'])} of {guaranteed} {is_are(v['guaranteed_in_use'])} in use"
    if v["in_use_by"]:
        used += f": {', '.join(v['in_use_by'])}"
    return used + (f"; this notebook needs {number(v['needs'])}." if v["guaranteed_in_use"] < v["reserved"] else ".")


def _never_over_quota(v: FactValues, names: Names) -> str:
    return f"{names.team(v['team'])} uses {number(v['uses'])} of its {_reserved(v)}; {_request_of(v)}, and "


def _held_for(v: FactValues, names: Names) -> str:
    whom = names.work(v["held_team"], v["held_kind"], v["held_for"], v["held_owner"])
    return f"held for {whom}, which has waited {duration(v['waited'])}; {_request_of(v)}."


def _held_limit(v: FactValues, names: Names) -> str:
    uses = f"{names.team(v['team'])} uses {number(v['uses'])} of its limit of {gpus(v['limit'])}"
    return f"{uses}, and {number(v['held_needs'])} {is_are(v['held_needs'])} {_held_for(v, names)}"


def _beside_guaranteed(v: FactValues, names: Names) -> str:
    per = "each" if v["each_gpus"] == 1 else f"every {gpus(v['each_gpus'])}"
    beside = _cpu_memory({"cpu": v["each_cpu"], "memory": v["each_memory"]}) or "room for a pod"
    teams = listed([names.team(team) for team in v["guaranteed_to"]], limit=4)
    kept = f"{gpus(v['kept'], 'free GPU')} guaranteed to {teams} ({beside} for {per})"
    return f"The free CPU and memory of {_pool(v, names)} are kept for {kept}; {_request_of(v)}."


def _kept(v: FactValues, names: Names) -> str:
    kept = f"{gpus(v['kept'])} of {_pool(v, names)} {is_are(v['kept'])} kept free"
    return f"{kept} for {names.team(v['team'])}"


def _free(v: FactValues, names: Names) -> str:
    return f"{gpus(v['free'])} of {_pool(v, names)} {is_are(v['free'])} free"


def _no_free_gpus(v: FactValues, names: Names) -> str:
    if not v["needs"]:
        return f"No node of {_pool(v, names)} has enough CPU and memory free; {_request_of(v)}."
    free = f"{number(v['free'])} of the {gpus(v['total'])} of {_pool(v, names)} {is_are(v['free'])} free"
    return f"{free}; {_request_of(v)}."


def _no_cpu_or_memory(v: FactValues, names: Names) -> str:
    if not v["needs"]:
        return _no_free_gpus(v, names)
    beside = _cpu_memory(v) or "the CPU and memory that it needs"
    return f"{_free(v, names)}, but on no node together with {beside}; {_request_of(v)}."


def _no_free_pods(v: FactValues, names: Names) -> str:
    full = f"{listed(v['nodes'], limit=4)} of {_pool(v, names)} {'runs' if len(v['nodes']) == 1 else 'run'}"
    many = f"{count(v['workers'], 'pod')}" if v["workers"] > 1 else "one more pod"
    return f"{full} as many pods as Kubernetes allows there; this {kind_name(v['kind'])} needs {many}."


def _beside(v: FactValues, names: Names) -> str:
    pools = [names.pool(pool) for pool in v["pools"]]
    of = f"pool {pools[0]}" if len(pools) == 1 else f"pools {listed(pools, limit=4)}"
    return f"Its nodes offer GPUs in {of}, too, whose work uses some of their CPU, memory and pods."


def _reclaim_cpu(v: FactValues, names: Names) -> str:
    held = f"{_cpu_memory(v) or 'the CPU or memory'} that this {kind_name(v['victim_kind'])} uses"
    return f"{_needs(v, names)} within its reservation, and some of the {held}."


def _shares_host(v: FactValues, names: Names) -> str:
    what, where = listed(v["what"]), listed(v["nodes"])
    return f"It makes way for a start in {_pool(v, names)} that needs {what} of {where}, which both pools share."


def _outranked(v: FactValues, names: Names) -> str:
    ids = v["ahead"]
    ahead = listed([*map(names.workload, ids[:4]), *ids[4:]], limit=4)  # no more than four of them are shown
    if not v["needs"]:
        taken = "CPU and memory" if _cpu_memory(v) else "room"
        took = f"{count(len(ids), 'workload')} ahead in {_pool(v, names)} took its {taken}"
        return f"{took} ({ahead}); {_request_of(v)}."
    return (
        f"{count(len(ids), 'workload')} ahead in {_pool(v, names)} took its free GPUs "
        f"({ahead}); {number(v['free'])} {is_are(v['free'])} left, {_request_of(v)}."
    )


def _protected(v: FactValues, names: Names) -> str:
    others = f", and {count(v['others'], 'other')} {'is' if v['others'] == 1 else 'are'}, too" if v["others"] else ""
    return f"{_victim(v, names)} is protected from jobs for its first {duration(v['min_runtime'])}{others}."


def _node_failed(v: FactValues, names: Names) -> str:
    down = f"{listed(v['nodes'], limit=4)} of {_pool(v, names)} {'is' if len(v['nodes']) == 1 else 'are'} not available"
    return f"{down}; {_request_of(v)} and fits nowhere else."


def _nodes_are(nodes: Sequence[str]) -> str:
    return f"{listed(nodes, limit=4)} {'is' if len(nodes) == 1 else 'are'}"


WITH_VICTIMS: Mapping[str, Callable[[FactValues, str], str]] = {
    "reclaiming": _reclaiming,
    "ready_after_reclaim": _ready_after_reclaim,
}
"""Sentences that list the victims of `by_victim` facts."""

SENTENCES: Mapping[str, Sentence] = {
    # Starts
    "starts_in_quota": _starts_in_quota,
    "starts_nominated": _starts_nominated,
    "starts_without_gpus": lambda v, n: f"{_starts(v, n)}: it requests no GPUs.",
    "starts_over_quota": _starts_over_quota,
    "starts_with_workers": lambda v, n: f"It starts with {v['workers']} of {v['of']} workers.",
    "ready_now": lambda v, n: "Ready now.",
    "ready_now_over_quota": lambda v, n: f"Ready now, over quota: the workload makes way {WHEN_NEEDED}.",
    # Evictions and moves
    "reclaim": lambda v, n: f"{_needs(v, n)} within its reservation; {_above_reservation(v, n)}; {_order(v, n)}.",
    "reclaim_own_team": lambda v, n: (
        f"{_needs(v, n)} within the reservation; {n.team(v['team'])}'s own jobs make way for it; {_order(v, n)}."
    ),
    "reclaim_own_policy": lambda v, n: (
        f"{_needs(v, n)} within the reservation and cannot be preempted; "
        f"{n.team(v['team'])}'s own jobs make way for it; {_order(v, n)}."
    ),
    "reclaim_own_limit": lambda v, n: (
        f"{_needs(v, n)} within the reservation, and {n.team(v['victim_team'])} is at its limit; {_order(v, n)}."
    ),
    "reclaim_fair_share": lambda v, n: (
        f"{_needs(v, n)} within its fair share; {_above_reservation(v, n)}; {_order(v, n)}."
    ),
    "reclaim_cpu": _reclaim_cpu,
    "shares_host": _shares_host,
    "preempt_in_team": lambda v, n: (
        f"{_needs(v, n)} and has a higher priority than this {kind_name(v['victim_kind'])} of the same team."
    ),
    "yield_in_team": _yield_in_team,
    "goes_on": lambda v, n: f"It saves a checkpoint and goes on with {v['workers']} of its {v['of']} workers.",
    "moves": _moves,
    # Sessions that are refused
    "no_reservation": lambda v, n: f"{n.team(v['team'])} has no guaranteed GPUs in {_pool(v, n)}.",
    "session_too_large": lambda v, n: (
        f"This notebook needs {gpus(v['needs'])}; {n.team(v['team'])} has {number(v['reserved'])} guaranteed."
    ),
    "guarantee_used": _guarantee_used,
    # Reasons to wait
    "nomination_free_soon": lambda v, n: (
        f"{gpus(v['needs'])} {is_are(v['needs'])} set aside for this {kind_name(v['kind'])} and about to be free."
    ),
    "queue_closed": lambda v, n: (
        f"The queue {v['queue']} is closed; move this {kind_name(v['kind'])} to another queue or cancel it."
    ),
    "workload_paused": lambda v, n: f"Paused: this {kind_name(v['kind'])} does not start until it is resumed.",
    "queue_paused": lambda v, n: f"Paused: the queue {v['queue']} starts nothing until it is resumed.",
    "no_pool": lambda v, n: f"Profile {n.profile(v['profile'])} names no pool that exists.",
    "too_large": lambda v, n: (
        f"Too large for {_pool(v, n)}: its largest node has {gpus(v['largest_node'])}; {_request_of(v)}."
    ),
    "too_large_together": lambda v, n: (
        f"Too large for {_pool(v, n)}: all its nodes together have no room for it; {_request_of(v)}."
    ),
    "only_jobs": lambda v, n: f"Only jobs run on the nodes of {_pool(v, n)}, and this is a {kind_name(v['kind'])}.",
    "node_failed": _node_failed,
    "node_lost": lambda v, n: f"It was running on {v['node']}, which was lost.",
    "nodes_held": lambda v, n: f"{_nodes_are(v['nodes'])} held for it.",
    "never_over_quota": lambda v, n: f"{_never_over_quota(v, n)}it may not be preempted, so it never runs over quota.",
    "team_never_over_quota": lambda v, n: f"{_never_over_quota(v, n)}{n.team(v['team'])} never runs over quota.",
    "limit": lambda v, n: (
        f"{n.team(v['team'])} uses {number(v['uses'])} of its limit of {gpus(v['limit'])}; {_request_of(v)}."
    ),
    "limit_with_nominations": lambda v, n: (
        f"{n.team(v['team'])} uses {number(v['uses'])} of its limit of {gpus(v['limit'])}, "
        f"counting GPUs that are set aside for its workloads; {_request_of(v)}."
    ),
    "pool_capacity": lambda v, n: (
        f"Pool {n.pool(v['pool'])} runs {number(v['uses'])} of its capacity of {gpus(v['capacity'])}; {_request_of(v)}."
    ),
    "held_nodes": lambda v, n: f"{_nodes_are(v['nodes'])} {_held_for(v, n)}",
    "held_capacity": lambda v, n: f"The capacity of {_pool(v, n)} is {_held_for(v, n)}",
    "held_limit": _held_limit,
    "beside_guaranteed": _beside_guaranteed,
    "kept": lambda v, n: f"{_kept(v, n)}, which lends none of them; {_request_of(v)}.",
    "kept_partly": lambda v, n: f"{_kept(v, n)}; {_request_of(v)}.",
    "nominated": lambda v, n: (
        f"{gpus(v['idle'])} of {_pool(v, n)} {is_are(v['idle'])} idle, but set aside for "
        f"{listed([n.workload(id) for id in v['nominees']], limit=4)}; {_request_of(v)}."
    ),
    "outranked": _outranked,
    "no_free_gpus": _no_free_gpus,
    "stuck": lambda v, n: (
        f"{_free(v, n)}, and {gpus(v['stuck'])} {is_are(v['stuck'])} held by pods or processes that should have ended; "
        f"{_request_of(v)}."
    ),
    "by_stuck": _stuck,
    "by_pod": lambda v, n: f"A pod of {n.workload(v['workload'])} on {v['node']} still terminates.",
    "fragmented": lambda v, n: f"{_free(v, n)}, but at most {v['most_on_a_node']} on one node; {_request_of(v)}.",
    "fragmented_blocks": lambda v, n: (
        f"{_free(v, n)}, but not in {v['workers']} blocks of {number(v['each'])}; {_request_of(v)}."
    ),
    "no_cpu_or_memory": _no_cpu_or_memory,
    "no_free_pods": _no_free_pods,
    "beside": _beside,
    "protected": _protected,
    "patience": lambda v, n: f"It waits {duration(v['wait'])} for free GPUs before other work makes way for it.",
    "no_victims": lambda v, n: "It is within the reservation, but no preemptible workload would free enough GPUs.",
    "awaits_nodes": lambda v, n: (
        f"{gpus(v['needs'])} {is_are(v['needs'])} set aside for this {kind_name(v['kind'])}, which starts once "
        f"{listed(v['nodes'])} {'is' if len(v['nodes']) == 1 else 'are'} ready, in about {duration(v['within'])}."
    ),
    "waiting_for_node": lambda v, n: f"Waits for a node of {_pool(v, n)}: {v['booting']} of {v['wanted']} booting.",
    "over_budget": lambda v, n: (
        f"Pool {n.pool(v['pool'])} may grow to {count(v['max_nodes'], 'node')} "
        f"and has no room left for this {kind_name(v['kind'])}."
    ),
    "machine_coming": lambda v, n: machine_coming(v),
    "machine_in_time": lambda v, n: "No other workload makes way for it unless the machine is late.",
    "machine_undecided": lambda v, n: f"Whether a machine of {_pool(v, n)} comes for it is decided in a moment.",
    "no_deployment": lambda v, n: f"No machine is coming for it: no deployment launches machines for {_pool(v, n)}.",
    "no_deployment_offered": lambda v, n: (
        f"No machine would be started for it: no deployment launches machines for {_pool(v, n)}."
    ),
    "no_machine": lambda v, n: no_machine(v),
    "machine_count": lambda v, n: machine_count(v),
    "no_launch": lambda v, n: no_launch(v),
    "machine_offered": lambda v, n: machine_offered(v),
    "machine_on_its_way": lambda v, n: machine_on_its_way(v),
    "no_machine_offered": lambda v, n: no_machine_offered(v),
    "next_launch": lambda v, n: next_launch(v),
    # The reference engine, which does not look for the cause
    "plain_start": lambda v, n: (
        f"Starts on {listed(v['nodes'])} {'within its reservation' if v['in_quota'] else 'over quota'}."
    ),
    "plain_evict": lambda v, n: f"Evicted for {n.workload(v['preemptor'])}; {gpus(v['frees'])} become free.",
    "plain_move": lambda v, n: (
        f"Goes on with {v['workers']} of {v['of']} workers on {listed(v['nodes'])}, for {n.workload(v['preemptor'])}."
    ),
    "plain_wait": lambda v, n: f"Waits: {v['code']}.",
    "plain_nomination": lambda v, n: (
        f"Starts on {listed(v['nodes'])} once {listed([n.workload(id) for id in v['victims']]) or 'nothing'} is gone."
    ),
    "plain_refusal": lambda v, n: "The notebook is beyond the reservation.",
    # Scale-up
    "scale_up": lambda v, n: (
        f"{count(v['workloads'], 'workload')} would fill {count(v['wanted'], 'more node')} of {_pool(v, n)}."
    ),
}
