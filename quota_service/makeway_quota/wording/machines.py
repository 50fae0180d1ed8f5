"""Write what becomes of machines as sentences: for administrators, and for those whose work waits for one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from makeway_api.durations import duration
from makeway_api.quantities import count, gpus, listed

FactValues = Mapping[str, Any]

REASONS: Mapping[str, str] = {
    "launched": "The provider has an instance for it, which boots.",
    "joined": "Its agent has joined, and runs the init script.",
    "ready": "Its init script ended well, and it has what its type promises.",
    "needed": "It was draining, and work needs it again.",
    "heard_again": "Its agent reports again.",
    "silent": "Its agent sends no reports.",
    "lost": "Its agent was silent for too long; its work goes on elsewhere.",
    "no_answer": "The provider did not answer the launch; what it may have launched is looked for and ended.",
    "spin_up_timeout": "It was not ready in time (spin_up_timeout).",
    "wrong_gpus": "It has another number of GPUs than its type.",
    "init_failed": "Its init script failed.",
    "not_needed": "No work waits for it any more.",
    "idle": "It had no work for the whole of idle_timeout.",
    "move": "Its work was moved to fewer machines.",
    "age": "It is older than max_age.",
    "removed": "The document no longer has its type, or the type has another pool or number of GPUs now.",
    "pause": "The deployment is paused or being deleted.",
    "budget": "The budget of the month is used up.",
    "spot": "The provider takes it back.",
    "max_machines": "The document allows fewer machines now.",
    "hour_budget": "The budget of an hour does not allow it.",
    "month_budget": "The budget of the month does not allow it.",
    "price_unknown": "Its price is not known, and the deployment has a budget.",
    "stopped": "The provider stopped it.",
    "ended_by_provider": "The provider ended it.",
    "not_listed": "The provider does not list it any more.",
    "stock_out": "The provider has no such machine now.",
    "quota": "The provider's quota for this account allows no more machines of this type.",
    "throttled": "The provider takes no more calls for now.",
    "denied": "The provider refuses the credentials, or they lack a right for this call.",
    "invalid": "The provider rejects the request as invalid.",
    "boot_failed": "Machines of this type did not become ready.",
    "spot_lost": "The provider takes back spot machines of this type.",
    "no_provider": "The service cannot use the provider.",
    "soon_free": "Jobs that reach their time limit make room before it would be ready.",
}
"""By the code of the cause: of states, of failures of launches, and of launches that are not made"""


def machine_reason(code: str) -> str:
    """Return the sentence of a cause, "" for one that has none."""
    return REASONS.get(code, "")


CAN_LAUNCH = "Launches machines when work waits for them."
CANNOT_LAUNCH = (
    "Nothing is launched: this service has no backend for machines. Add machines to MAKEWAY_BACKEND "
    "(in the chart: clusterAutoscaler.enabled)."
)


UNUSABLE = "Nothing is launched: the service cannot use its provider, and tries again."
HOLDS_UP_ENDS = " The service cannot use its provider, which may hold that up, and tries again."


def deployment_activity(
    machines: int, *, paused: bool, deleting: bool, can_launch: bool = True, unusable: bool = False
) -> str:
    """Return what a deployment does now; `machines` are not over.

    `can_launch`: whether the service launches any; `unusable`: whether it cannot use the provider.
    """
    if unusable and not (deleting or paused):
        return UNUSABLE
    held_up = HOLDS_UP_ENDS if unusable else ""
    ending = f"{count(machines, 'machine')} {'ends' if machines == 1 else 'end'} first"
    if deleting:
        return f"Being deleted: {ending}.{held_up}" if machines else "Being deleted: it has no machines any more."
    if paused:
        rest = f"{count(machines, 'machine')} {'is' if machines == 1 else 'are'} being ended"
        return f"Paused: nothing is launched, and {rest}.{held_up}" if machines else "Paused: nothing is launched."
    return CAN_LAUNCH if can_launch else CANNOT_LAUNCH


def static_pools(pools: Collection[str]) -> str:
    """Return that no machine is launched for the work of some pools, and what to do."""
    one = len(pools) == 1
    return (
        f"No machine is launched for work that waits for the {'pool' if one else 'pools'} {listed(sorted(pools))}: "
        f"give {'it' if one else 'them'} kind: autoscaled in the policy, or name another pool."
    )


COLOURS = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
"""The sequences by which programs colour a terminal, move its cursor or name its window"""
HIDDEN = re.compile(
    r"[^\S \t\n]|[\x00-\x08\x0e-\x1f\x7f-\x9f\u00ad\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]"
    "|[\U000e0000-\U000e007f]"
)
"""Characters that cannot be seen, or change how others are shown"""


def readable(text: str, omitted: int = 0) -> str:
    """Return what a console or an init script wrote as text that a page and a terminal can show as it is.

    Sequences for terminals are left out, a line that was written over is one more line, and what cannot be seen is its
    number, such as \\x07. `omitted`: the characters that are missing in the middle.
    """
    if omitted:
        half = len(text) // 2
        text = f"{text[:half]}\n… ({omitted:,} characters are left out)\n{text[half:]}"
    text = re.sub(r"\r+\n|\r", "\n", COLOURS.sub("", text))
    return HIDDEN.sub(lambda one: one[0].encode("unicode_escape").decode(), text)


# -- why work waits --------------------------------------------------------------------------------------------


def _money(amount: float, currency: str) -> str:
    return f"{amount:,.2f} {currency}"


def _has(v: FactValues) -> str:
    return f"{v['deployment']} has {v['all_machines']} of at most {count(v['limit'], 'machine')}"


def machine_coming(v: FactValues) -> str:
    """Return which machines are coming for a workload: `Waiting for a machine: booting, about 3.10 EUR/h. …`.

    `after`: the seconds from when others make way for it until they are ready.
    """
    many, booting, ready = v["machines"], v["booting"], v["ready"]
    boots = "booting for longer than most do" if v["late"] else "booting"
    if many > 1:
        states = [f"{booting} of {many} {boots if booting else 'booting'}"] + ([f"{ready} ready"] if ready else [])
        head = f"Waiting for {many} machines: {', '.join(states)}"
    else:
        head = f"Waiting for a machine: {'ready in a moment' if ready else boots if booting else 'being launched'}"
    if v["late"] and not booting:
        head += ", later than usual"
    if "after" in v:
        head += f", ready about {duration(v['after'])} after others make way"
    if "price" in v:
        head += f", about {_money(v['price'], v['currency'])}/h"
    return f"{head}. {_has(v)}."


def no_machine(v: FactValues) -> str:
    """Return that no machine is coming for a workload, and the first cause of that where there is one."""
    return f"No machine is coming for it: {_why(v)}."


def machine_count(v: FactValues) -> str:
    """Return how many machines there are, and may be: `cloud has 1 of at most 3 machines.`."""
    return f"{_has(v)}."


# -- what a request would get ------------------------------------------------------------------------------------


def machine_offered(v: FactValues) -> str:
    """Return which machines would be started for a request: `A machine of type g2 would be started: ready in …`."""
    types: Counter[str] = Counter(v["types"])
    texts = [f"{'a machine' if many == 1 else f'{many} machines'} of type {name}" for name, many in types.items()]
    text = listed(texts) + " would be started"
    if v["existing"]:
        text += f", and {v['existing']} that {'exists has' if v['existing'] == 1 else 'exist have'} room"
        total = v["machines"]
        return f"{_capital(text)}: {_when(v)}{_price(v)} for {'both' if total == 2 else f'all {total}'}. {_has(v)}."
    return f"{_capital(text)}: {_when(v)}{_price(v)}. {_has(v)}."


def machine_on_its_way(v: FactValues) -> str:
    """Return that machines which are ready or on their way would have room for a request."""
    many, ready = v["machines"], v["ready"]
    if many == 1:
        text = "A machine that is ready has" if ready else f"A machine that is already {_stage(v)} has"
    elif ready in (0, many):
        text = f"{many} machines that are {'ready' if ready else f'already {_stage(v)}'} have"
    else:
        text = f"{many} machines, {ready} of them ready, have"
    when = "" if ready == many else f": {_when(v)}"
    return f"{text} room for it{when}{_price(v)}. {_has(v)}."


def _stage(v: FactValues) -> str:
    return "booting" if v["booting"] else "being launched"


def _when(v: FactValues) -> str:
    if "seconds" in v:
        return f"ready in about {duration(v['seconds'])}"
    return "ready later than usual" if v.get("late") else "boot time not known yet"


def _price(v: FactValues) -> str:
    return f", about {_money(v['price'], v['currency'])}/h" if "price" in v else ""


def no_machine_offered(v: FactValues) -> str:
    """Return that no machine would be started for a request, and the first cause of that where there is one."""
    return f"No machine would be started for it: {_why(v)}."


def next_launch(v: FactValues) -> str:
    """Return when a launch is tried again."""
    return f"The next try is in about {duration(v['seconds'])}."


# -- why none is launched ----------------------------------------------------------------------------------------


def _limit(v: FactValues) -> str:
    of = f"of type {v['type']} " if v["type"] else ""
    return f"at most {count(v['limit'], 'machine')} {of}{'is' if v['limit'] == 1 else 'are'} allowed"


def _used_up(v: FactValues, what: str) -> str:
    used, one = f"{v['used']:,.2f} of {_money(v['limit'], v['currency'])}", _money(v["price"], v["currency"])
    return f"the budget {what} leaves no room, as {used} are taken and a machine of type {v['type']} costs {one}/h"


CAUSES: Mapping[str, Callable[[FactValues], str]] = {
    "paused": lambda v: f"{v['deployment']} is paused",
    "no_provider": lambda v: f"the service cannot use the provider of {v['deployment']}",
    "deleting": lambda v: f"{v['deployment']} is being deleted",
    "max_machines": _limit,
    "hour_budget": lambda v: _used_up(v, "of an hour"),
    "month_budget": lambda v: _used_up(v, "of the month"),
    "price_unknown": lambda v: f"{v['deployment']} has a budget, and the price of a machine is not known",
    "too_small": lambda v: f"no type of {v['deployment']} is large enough, as the largest has {gpus(v['gpus'])}",
    "stock_out": lambda v: f"the provider is out of machines of type {v['type']}",
    "quota": lambda v: f"the provider's quota for this account allows no more machines of type {v['type']}",
    "throttled": lambda v: "the provider takes no more calls for now",
    "denied": lambda v: "the provider refuses the credentials, or they lack a right for this call",
    "invalid": lambda v: f"the provider rejects the request for type {v['type']} as invalid",
    "boot_failed": lambda v: f"machines of type {v['type']} did not become ready",
    "spot_lost": lambda v: f"the provider takes back spot machines of type {v['type']}",
    "no_answer": lambda v: f"the provider did not answer the last launch of type {v['type']}",
    "soon_free": lambda v: f"jobs that reach their time limit make room before one of type {v['type']} would be ready",
}
"""By the code of the cause for which no machine is launched: what follows `No machine is coming for it:`"""
NAME_FIRST = frozenset({"paused", "deleting", "price_unknown"})
"""The causes that begin with the name of the deployment, which stays as it is"""


def no_launch(v: FactValues) -> str:
    """Return why no machine is launched for a workload, as a sentence."""
    text = CAUSES[v["cause"]](v)
    return f"{text if v['cause'] in NAME_FIRST else _capital(text)}."


def _why(v: FactValues) -> str:
    if "cause" not in v:
        return _has(v)
    return f"{_partly(v)}: {CAUSES[v['cause']](v)}" if "placed" in v else CAUSES[v["cause"]](v)


def _partly(v: FactValues) -> str:
    """Return that machines for some of the workers are not enough, though other deployments may add the rest."""
    all_of = f"the machines for its {v['workers']} workers have to come from one deployment"
    return f"{all_of}, and {v['deployment']} can launch them for {count(v['placed'], 'worker')} only"


def _capital(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"
