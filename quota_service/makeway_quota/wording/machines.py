"""Write the causes of the states of machines, and what a deployment does, as sentences for administrators."""

from __future__ import annotations

from collections.abc import Mapping

from makeway_api.quantities import count

REASONS: Mapping[str, str] = {
    "launched": "The provider has an instance for it, which boots.",
    "joined": "Its agent has joined, and runs the init script.",
    "ready": "Its init script ended well, and its GPUs are there.",
    "needed": "It was draining, and work needs it again.",
    "heard_again": "Its agent reports again.",
    "silent": "Its agent sends no reports.",
    "lost": "Its agent was silent for too long; its work goes on elsewhere.",
    "no_answer": "The provider did not answer the launch; what it may have launched is looked for and ended.",
    "spin_up_timeout": "It was not ready within spin_up_timeout.",
    "wrong_gpus": "It has another number of GPUs than its type.",
    "init_failed": "Its init script failed.",
    "not_needed": "No work waits for it any more.",
    "idle": "It had no work for idle_timeout.",
    "move": "Its work was moved to fewer machines.",
    "age": "It is older than max_age.",
    "removed": "The document does not name its type any more.",
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
    "quota": "The account at the provider may have no more machines of this kind.",
    "throttled": "The provider takes no more calls for now.",
    "denied": "The provider refuses the credentials.",
    "invalid": "The provider does not take the request.",
    "boot_failed": "Machines of this type did not become ready.",
    "spot_lost": "The provider takes back spot machines of this type.",
}
"""By the code of the cause: of states, of failures of launches, and of launches that are not made"""


def machine_reason(code: str) -> str:
    """Return the sentence of a cause, "" for one that has none."""
    return REASONS.get(code, "")


DRIVEN = "Launches machines when work waits for them."
NOT_DRIVEN = "Nothing is launched: this service has no backend for machines. Add machines to MAKEWAY_BACKEND."


def deployment_does(machines: int, *, paused: bool, deleting: bool, driven: bool = True) -> str:
    """Return what a deployment does now; `machines` are not over. `driven`: whether the service launches any."""
    ending = f"{count(machines, 'machine')} {'ends' if machines == 1 else 'end'} first"
    if deleting:
        return f"Being deleted: {ending}." if machines else "Being deleted: it has no machines any more."
    if paused:
        rest = f"{count(machines, 'machine')} {'is' if machines == 1 else 'are'} being ended"
        return f"Paused: nothing is launched, and {rest}." if machines else "Paused: nothing is launched."
    return DRIVEN if driven else NOT_DRIVEN
