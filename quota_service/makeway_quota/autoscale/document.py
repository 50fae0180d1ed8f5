"""Read and write the document of a deployment: YAML, every problem at once with its line, and help for each field.

It is apart from the policy document, whose pools it names: pausing or exporting a deployment touches no policy. The
form of a deployment is made from the same schema, with the help of each field. It has no secret.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

import yaml
from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator, StringConstraints

from ..policy.issues import Issue, Loc, PolicyInvalid, Problem, did_you_mean, quote, sorted_issues, text_of_loc
from ..policy.quantities import Cores, Flag, Label, Mib, Name, Seconds, Title, Version, count
from ..policy.source import Plain, UnreadableDocument, parse
from ..policy.tables import Many, Table, Texts, problem, validate_partly, wrong
from .budget import MICROS_PER_UNIT
from .deployment import CLUSTER, DAY_MINUTES, DAYS, Day, Deployment, IdleSchedule, MachineType, Markets, MoveRules
from .providers.settings import SETTINGS, provider_problems

MAX_BYTES = 500_000
MAX_MONEY = 100_000_000
MIN_LOST_AFTER = 60.0
"""Seconds: reports come every ten, and when they came is written every twenty; one may be missing"""
MIN_POLL_INTERVAL = 1.0
"""Seconds: a provider that is asked all the time throttles launches, too"""
MIN_MOVE_EVERY = 60.0
"""Seconds: a job that is moved has to save, and to load what it saved"""
CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)|24:00")
CURRENCY = re.compile(r"[A-Z]{3}")
SECRET = re.compile(r"(?i)(pass(word|wd)?|secret|token|credential|(access|api|private)_?key)")


def _money(value: Any) -> int:
    """Return an amount of money in millionths, exact to the last digit."""
    try:
        amount = Decimal(value if isinstance(value, Plain) else "")
    except InvalidOperation:
        raise wrong(value, "an amount of money such as 3.10") from None
    if not amount.is_finite() or not 0 <= amount <= MAX_MONEY:
        raise problem(f"{value[:60]} is not between 0 and {MAX_MONEY:,}")
    if amount * MICROS_PER_UNIT != int(amount * MICROS_PER_UNIT):
        raise problem(f"{value[:60]} is finer than a millionth; round it")
    return int(amount * MICROS_PER_UNIT)


def _written_money(millionths: int | None) -> int | float | None:
    """Return an amount as it is written: below MAX_MONEY, a float has all of its digits."""
    if millionths is None or millionths % MICROS_PER_UNIT == 0:
        return None if millionths is None else millionths // MICROS_PER_UNIT
    return millionths / MICROS_PER_UNIT


def _minute(value: Any) -> int:
    if not isinstance(value, str) or not CLOCK.fullmatch(value.strip()):
        raise wrong(value, "a time of the day such as 08:30")
    hour, _, minute = value.strip().partition(":")
    return int(hour) * 60 + int(minute)


def _days(named: tuple[str, ...]) -> tuple[Day, ...]:
    for day in named:
        if day not in DAYS:
            raise problem(f"{quote(day)} is not a day; {did_you_mean(day, DAYS)}")
    return tuple(day for day in DAYS if day in named)


def _currency(value: str) -> str:
    if not CURRENCY.fullmatch(value):
        raise problem(f"{quote(value)} is not a currency; write its three letters, such as EUR")
    return value


def _timezone(value: str) -> str:
    try:
        ZoneInfo(value)
    except (ValueError, OSError, KeyError):
        raise problem(f"{quote(value)} is not a time zone; write one such as Europe/Berlin") from None
    return value


def _not_always(seconds: float) -> float:
    if seconds < MIN_MOVE_EVERY:
        raise problem(f"jobs would be moved all the time; make it at least {MIN_MOVE_EVERY:g} seconds")
    return seconds


def _some_jobs(jobs: int) -> int:
    if jobs < 1:
        raise problem("no job would ever be moved; name at least 1, or remove moves")
    return jobs


def _no_secrets(settings: dict[str, str]) -> dict[str, str]:
    for key in settings:
        if SECRET.search(key):
            raise problem(f"{quote(key)} looks like a secret; secrets are not part of a document, which is exported")
    return settings


Amount = Annotated[int, PlainValidator(_money), PlainSerializer(_written_money)]
Minute = Annotated[int, PlainValidator(_minute), PlainSerializer(lambda at: f"{at // 60:02}:{at % 60:02}")]
Text = Annotated[str, StringConstraints(max_length=65_536)]
MaybeLabel = Annotated[str, StringConstraints(strip_whitespace=True, max_length=200)]


class ScheduleTable(Table):
    """An entry of a machine type's `schedule`."""

    record = IdleSchedule

    machines: Annotated[int, count("machines", 1000)] = Field(
        description="How many machines are kept without work while the entry applies"
    )
    days: Annotated[Many[str], AfterValidator(_days)] = Field(
        DAYS, description="Days of the week: mon, tue, …; default: all"
    )
    start: Minute = Field(0, description="When it begins, such as 08:30, in the deployment's time zone")
    end: Minute = Field(DAY_MINUTES, description="When it ends; before `start`, it is past midnight")


class MovesTable(Table):
    """The table `moves` of a document."""

    record = MoveRules

    interval: Annotated[Seconds, AfterValidator(_not_always)] = Field(
        3600.0,
        alias="every",
        description="Seconds from one move to the next; jobs that run for less are never moved; at least 60",
    )
    free_gpus: Annotated[int, count("GPUs", 10_000)] = Field(
        3, alias="headroom", description="Whole GPUs that stay free on the other machines with work after a move"
    )
    max_jobs: Annotated[int, count("jobs", 100), AfterValidator(_some_jobs)] = Field(
        2, alias="most", description="Jobs that are moved at once, at most: a machine with more keeps them"
    )


class TypeTable(Table):
    """An entry of `machine_types`."""

    record = MachineType

    name: Name = Field(description="A name of your own, such as gpu-8")
    pool: Name = Field(description="The pool of the policy document whose work its machines do")
    instance_type: Label = Field(alias="instance", description="What the provider calls the type, such as g5.2xlarge")
    gpus: Annotated[int, count("GPUs", 1024)] = Field(
        0, description="GPUs of a machine. One that reports another number is ended"
    )
    cpu: Cores = Field(0, description="Cores of a machine for work; 0: unlimited when machines are sized")
    memory: Mib = Field(
        0, description="Memory of a machine for work, such as 60Gi; 0: unlimited when machines are sized"
    )
    model: Title = Field("", description="Model of its GPUs, shown on the pages, such as H100")
    zones: Many[Label] = Field(("",), description="Zones to try, in order; default: the provider's choice")
    market: Markets = Field(
        "on_demand", description="on_demand, spot, or spot_first: on-demand where no spot machine is to be had"
    )
    price: Amount | None = Field(
        None,
        description="Price of a machine for an hour on demand; with a budget, no type without a price is launched",
    )
    spot_price: Amount | None = Field(
        None,
        description="Price of an hour on the spot market; `aws`: the most that it may cost; "
        "`gcp`: what Makeway counts, no limit at Google",
    )
    max_machines: Annotated[int, count("machines", 10_000)] = Field(1, description="Machines of this type, at most")
    min_idle: Annotated[int, count("machines", 1000)] = Field(
        0, description="Machines that are kept without work, ready at once"
    )
    schedule: Many[ScheduleTable] = Field((), description="Times with more machines that are kept without work")
    idle_timeout: Seconds = Field(
        600.0, description="Seconds for which a machine stays without work before it is ended"
    )
    spin_up_timeout: Seconds = Field(
        1200.0, description="Seconds that a machine may take from its launch until it is ready"
    )
    max_age: Seconds | None = Field(
        None, description="Seconds; older machines take no new work and end after the last one"
    )
    image: Annotated[str, StringConstraints(strip_whitespace=True, max_length=1000)] | None = Field(
        None, description="Container image of jobs that name none; without one, they run without containers"
    )
    init_script: Text = Field(
        "", description="Shell script that runs once on each new machine; a failure ends the machine"
    )
    cpu_only: Flag = Field(False, description="Hide the GPUs of its machines from jobs")
    machine_image: MaybeLabel = Field(
        "",
        description="What the disk of a machine begins as; `aws`: an AMI of the region, such as ami-0abc; `gcp`: "
        "projects/P/global/images/family/F; both need one",
    )
    disk: Mib = Field(0, description="Size of the first disk, such as 200Gi; `aws`, `gcp`; default: that of its image")
    subnets: Texts = Field(
        default_factory=dict, description="Subnet of each zone, such as {eu-central-1a: subnet-0abc}; `aws`, `gcp`"
    )
    security_groups: Many[Label] = Field(
        (), description="`aws`: security groups of a machine, such as sg-0abc; `gcp`: its network tags"
    )
    accelerator: MaybeLabel = Field(
        "", description="`gcp`: GPUs that are added to a machine of the N1 series, such as nvidia-tesla-t4"
    )


class DeploymentTable(Table):
    """The document of a deployment."""

    version: Version = Field(1, description="Version of the format; 1")
    name: Name = Field(description="Name of the deployment, also the tag of its machines at the provider")
    title: Title = Field("", description="Title on the pages, instead of the name")
    provider: Literal["aws", "gcp", "kubernetes", "local", "memory"] = Field(
        description="`aws`: Amazon EC2; `gcp`: Google Compute Engine; `kubernetes`: nodes that the cluster's own "
        "autoscaler adds; `local`: processes of this machine, for tests and the demo; `memory`: for tests"
    )
    settings: Annotated[Texts, AfterValidator(_no_secrets)] = Field(
        default_factory=dict,
        description="What the provider needs besides, such as a region: each has its own list below; no secrets",
    )
    currency: Annotated[str, AfterValidator(_currency)] = Field(
        "EUR", description="Currency of all prices and budgets, as three letters; nothing is converted"
    )
    hourly_budget: Amount | None = Field(
        None, alias="hour", description="Budget: what all machines together may cost in an hour"
    )
    monthly_budget: Amount | None = Field(
        None, alias="month", description="Budget of a calendar month; when it is used up, machines are ended"
    )
    max_machines: Annotated[int, count("machines", 10_000)] = Field(
        10, description="Machines of all types together, at most"
    )
    paused: Flag = Field(
        False, description="Launch nothing, and end machines that run, once their jobs had time to save"
    )
    timezone: Annotated[str, AfterValidator(_timezone)] = Field("UTC", description="Time zone of schedules and months")
    drain_timeout: Seconds = Field(
        300.0, description="Seconds for which work may save when its machine is ended for a pause or the budget"
    )
    orphan_after: Seconds = Field(
        900.0,
        description="Seconds after which a machine without the service and without work powers off",
    )
    poll_interval: Seconds = Field(15.0, description="Seconds between two lists of the provider")
    request_timeout: Seconds = Field(120.0, description="Seconds for which an answer to a launch is waited for")
    lost_after: Seconds = Field(
        120.0, description="Seconds for which a machine may be silent before its work goes elsewhere; at least 60"
    )
    visibility: Seconds = Field(
        300.0, description="Seconds for which the provider's lists may be without a new machine"
    )
    priority: Annotated[int, count("steps", 1000)] = Field(
        0,
        description="Of deployments for one pool that with the higher number launches first, then the one whose "
        "cheapest GPU costs less",
    )
    moves: MovesTable | None = Field(
        None,
        description="Move preemptible jobs to other machines, so that the least used one is given back, such as "
        "{every: 3600, headroom: 3, most: 2}; default: no job is moved",
    )
    machine_types: Many[Any] = Field((), description="Machine types, the preferred ones first")


def read_deployment(
    text: str, file: str = "deployment.yaml", pools: Collection[str] | None = None, *, stored: bool = False
) -> Deployment:
    """Return the deployment of a document; PolicyInvalid lists everything that is wrong with it.

    `pools`: those of the policy document; None: not compared. `stored`: what an earlier release may have saved is read,
    too, such as settings of a cluster that are not known.
    """
    try:
        source = parse(text, MAX_BYTES)
    except UnreadableDocument as error:
        raise PolicyInvalid(error.issues(file)) from None
    given = source.value.get("machine_types") if isinstance(source.value, dict) else None
    top, result = validate_partly(DeploymentTable, source.value, {"slugs": True})
    problems: list[Problem] = list(result)
    types: list[tuple[Loc, TypeTable]] = []
    for at, value in enumerate(given if isinstance(given, list) else ()):
        table, wrong_values = validate_partly(TypeTable, value, {"slugs": True})
        loc: Loc = ("machine_types", at)
        problems += [((*loc, *inner), message) for inner, message in wrong_values]
        if table is not None:
            types.append((loc, table))
    problems += _check_types(top, types, pools)
    if top is not None:
        problems += _check(top)
    if not stored:  # earlier releases have saved such documents: they have to be read
        problems += _check_new(top, types)
    kinds = [(loc, table.as_value(MachineType)) for loc, table in types]
    deployment = None
    if top is not None:
        deployment = top.as_value(Deployment, types=tuple(machine_type for _, machine_type in kinds))
        problems += provider_problems(deployment, [loc for loc, _ in kinds], stored=stored)
    if problems or deployment is None:
        raise PolicyInvalid(
            sorted_issues(Issue(file, source.line(loc), text_of_loc(loc), message) for loc, message in problems)
        )
    return deployment


def static_pool_warnings(text: str, file: str, autoscaled: Collection[str]) -> list[Issue]:
    """Return a warning for each type of a valid document whose pool gets no machines for the work that waits.

    Those that are kept idle are launched for any pool. `autoscaled`: the pools of that kind.
    """
    source = parse(text, MAX_BYTES)
    result = []
    for at, machine_type in enumerate(read_deployment(text, file, stored=True).types):
        if machine_type.pool not in autoscaled:
            loc: Loc = ("machine_types", at, "pool")
            message = (
                f"the pool {machine_type.pool} is not of kind autoscaled, so no machine is launched for work that "
                "waits there; name one that is, or give it kind: autoscaled"
            )
            result.append(Issue(file, source.line(loc), text_of_loc(loc), message))
    return result


def _check(top: DeploymentTable) -> Iterator[Problem]:
    """Yield what contradicts within the document."""
    if not top.machine_types:
        yield ("machine_types",), "the list of machine types is empty; name one with its pool, instance and price"
    if top.lost_after < MIN_LOST_AFTER:
        yield (
            ("lost_after",),
            f"machines are heard of every ten to thirty seconds; give them at least {MIN_LOST_AFTER:g} seconds",
        )
    if top.lost_after >= top.orphan_after:
        yield (
            ("orphan_after",),
            "a machine would power off before its work goes elsewhere; make it longer than lost_after",
        )


def _check_new(top: DeploymentTable | None, types: list[tuple[Loc, TypeTable]]) -> Iterator[Problem]:
    """Yield what costs calls or machines without end."""
    if top is not None and top.poll_interval < MIN_POLL_INTERVAL:
        yield (
            ("poll_interval",),
            f"the provider would be asked all the time; make it at least {MIN_POLL_INTERVAL:g} second",
        )
    for loc, kind in types:
        if kind.max_age is not None and kind.max_age <= kind.spin_up_timeout:
            yield (
                (*loc, "max_age"),
                "a machine could be too old as soon as it is ready, and would be replaced again and again; "
                "make it longer than spin_up_timeout",
            )


def _check_types(
    top: DeploymentTable | None, types: list[tuple[Loc, TypeTable]], pools: Collection[str] | None
) -> Iterator[Problem]:
    """Yield what contradicts within machine types, and with the pools of the policy.

    `top` is None where a mistake in the document leaves too little of it.
    """
    seen: set[str] = set()
    limited = top is not None and (top.hourly_budget is not None or top.monthly_budget is not None)
    for loc, kind in types:
        if kind.name in seen:
            yield (*loc, "name"), f"the name {quote(kind.name)} is used twice; give each its own"
        seen.add(kind.name)
        if pools is not None and kind.pool not in pools:
            yield (*loc, "pool"), f"there is no pool {quote(kind.pool)}; {did_you_mean(kind.pool, pools)}"
        if len(set(kind.zones)) < len(kind.zones):
            yield (*loc, "zones"), "a zone is listed twice; keep one"
        if kind.has("zones") and not kind.zones:
            yield (*loc, "zones"), "no zone is named; name one, or remove the key to leave the choice to the provider"
        if kind.min_idle > kind.max_machines:
            yield (*loc, "min_idle"), f"{kind.min_idle} is more than the {kind.max_machines} of max_machines"
        yield from _prices(loc, kind, limited)
        if top is not None and top.provider == CLUSTER:
            yield from _of_cluster(loc, kind)


def _of_cluster(loc: Loc, kind: TypeTable) -> Iterator[Problem]:
    """Yield what a node that the cluster's autoscaler adds cannot be told."""
    if kind.market != "on_demand":
        yield (*loc, "market"), "the cluster chooses the market; make a pool of its spot nodes by their label"
    for key in ("init_script", "image", "cpu_only"):
        if kind.has(key):
            yield (*loc, key), f"nodes of the cluster have no {key}; remove it"


def _prices(loc: Loc, kind: TypeTable, limited: bool) -> Iterator[Problem]:
    needed = {"on_demand": ("price",), "spot": ("spot_price",), "spot_first": ("spot_price", "price")}[kind.market]
    prices: Mapping[str, int | None] = {"price": kind.price, "spot_price": kind.spot_price}
    for key in needed:
        if limited and prices[key] is None:
            yield (*loc, key), f"the document has a budget, and {key} is not known; give it, or no machine is launched"
    if kind.market == "on_demand" and kind.spot_price is not None:
        yield (*loc, "spot_price"), "only the spot market has a spot price; set market: spot_first, or remove it"


def write_deployment(deployment: Deployment) -> str:
    """Return the document of a deployment, which reads back as the same; what has its default is left out."""
    table = DeploymentTable.of(deployment, version=1, machine_types=())
    tree = table.written() | {
        "machine_types": [TypeTable.of(machine_type).written() for machine_type in deployment.types]
    }
    if deployment.moves is not None:
        tree["moves"] = MovesTable.of(deployment.moves).model_dump(by_alias=True)
    plain = {key: dict(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    return yaml.safe_dump({"version": 1} | plain, sort_keys=False, allow_unicode=True, width=120)


def schema() -> dict[str, list[tuple[str, str, str]]]:
    """Return the fields of each table with default and help: of the document, a machine type, a schedule, settings."""
    tables: dict[str, type[Table]] = {
        "document": DeploymentTable,
        "moves": MovesTable,
        "machine_types": TypeTable,
        "schedule": ScheduleTable,
    }
    result = {
        name: [
            (
                field.alias or key,
                "required" if field.is_required() else (written_defaults(table)[key] or "none"),
                field.description or "",
            )
            for key, field in table.model_fields.items()
        ]
        for name, table in tables.items()
    }
    for provider, settings in SETTINGS.items():
        rows = [(one.name, "required" if one.required else one.default or "none", one.help) for one in settings]
        result[f"settings ({provider})"] = rows
    return result


def written_defaults(table: type[Table]) -> dict[str, str]:
    """Return the defaults of a table as a document has them, such as 24:00, "" for none."""
    defaults = table.model_construct().model_dump()
    return {key: "" if (shown := _shown(value)) == "none" else shown for key, value in defaults.items()}


def _shown(value: Any) -> str:
    if value is None or value in ((), {}, "", ("",)):
        return "none"
    return (
        str(value).lower() if isinstance(value, bool) else ", ".join(value) if isinstance(value, tuple) else str(value)
    )
