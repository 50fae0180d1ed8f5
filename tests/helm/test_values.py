"""The chart's values, its schema and its dashboard fit the service that it installs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, get_args

import promql_parser
import pytest
import yaml
from charts import CHART
from makeway_api.models import TeamUsage
from makeway_api.settings import camel, declared
from makeway_quota import __version__
from makeway_quota.autoscale.backoff import FailureClass
from makeway_quota.metrics import REGISTRY
from makeway_quota.policy import read_policy
from makeway_quota.settings import ServiceSettings


def schema() -> dict[str, Any]:
    result: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    return result


def test_each_setting_of_the_site_is_a_value_with_the_services_own_bounds() -> None:
    offered = schema()["properties"]["service"]["properties"]["settings"]["properties"]
    settings = declared(ServiceSettings)
    assert offered == {camel(name): one.schema for name, one in settings.items() if one.scope == "site"}
    assert offered["tickSeconds"] == {"type": "number", "minimum": 0.05, "maximum": 60}


def test_the_chart_sets_the_settings_that_are_its_own_and_no_other() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in (CHART / "templates").rglob("_env.tpl"))
    given = set(re.findall(r"MAKEWAY_[A-Z0-9_]+", text))
    settings = declared(ServiceSettings).values()
    assert not {one.variable for one in settings if one.scope == "chart"} - given
    assert not {one.variable for one in settings if one.scope != "chart"} & given


def test_every_value_is_in_the_schema_and_every_property_has_a_value() -> None:
    def compare(values: Any, rule: dict[str, Any], path: str) -> None:
        if "$ref" in rule:
            rule = schema()["$defs"][rule["$ref"].rpartition("/")[2]]
        if rule.get("additionalProperties") is not False or path.endswith((".settings", ".resources")):
            return
        assert set(values) == set(rule["properties"]) - {"global"}, path
        for name, value in values.items():
            compare(value, rule["properties"][name], f"{path}.{name}")

    compare(yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")), schema(), "")


def test_the_defaults_that_an_add_on_compares_with_are_those_of_the_values() -> None:
    text = (CHART / "templates/_add_on.tpl").read_text(encoding="utf-8")
    compared = yaml.safe_load(text.partition('define "makeway.standaloneValues" -}}')[2].partition("{{-")[0])
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    for part in ("hub", "proxy", "notebooks"):
        assert compared.pop(part) == values[part]
    for part, path in (("images", ()), ("networkPolicy", ("extraEgress",))):
        defaults, mine = values[part], compared.pop(part)
        for name in path:
            defaults, mine = defaults[name], mine[name]
        assert mine == {name: defaults[name] for name in mine}
        assert set(defaults) - set(mine) <= {"service", "notebook", "jobs", "pullPolicy", "pullSecrets"}
    assert not compared


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == __version__


def test_the_first_policy_is_valid() -> None:
    document = read_policy((CHART / "files/policy.yaml").read_text(encoding="utf-8"), "policy.yaml")
    assert [pool.name for pool in document.pools] == ["gpu"]


def exported() -> dict[str, set[str]]:
    """Return the labels of each series that the service exports."""
    result: dict[str, set[str]] = {}
    for collector, names in REGISTRY._collector_to_names.items():
        labels = set(collector._labelnames)  # type: ignore[attr-defined]
        result |= {name: labels | ({"le"} if name.endswith("_bucket") else set()) for name in names}
    return result


@pytest.mark.covers("N19")
def test_the_dashboard_shows_series_and_labels_that_the_service_exports() -> None:
    dashboard = json.loads((CHART / "files/dashboard.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) > 5
    assert_exported(expressions)
    ids = [panel["id"] for panel in dashboard["panels"]]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len({*ids}) == len({*places}) == len(ids)


@pytest.mark.covers("N19")
def test_alerts_are_about_series_and_labels_that_the_service_exports() -> None:
    groups = yaml.safe_load((CHART / "files/alerts.yaml").read_text(encoding="utf-8"))["groups"]
    rules = {rule["alert"]: rule for group in groups for rule in group["rules"]}
    assert_exported([rule["expr"] for rule in rules.values()])
    classes = set(get_args(FailureClass))
    for name, rule in rules.items():
        told = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", told)) <= labels_of(promql_parser.parse(rule["expr"])), name
        for chosen in re.findall(r'failure=~?"([^"]+)"', rule["expr"]):
            assert set(chosen.split("|")) <= classes, name
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert promql_parser.parse_duration(rule.get("for", "1m")).total_seconds() >= 60
    assert len(rules) >= 5


@pytest.mark.parametrize(
    "expression",
    [
        "max by (part) (makeway_part_works) = 0",
        "max by (part) (makeway_part_works[5m]) == 0",
        "sum(rate(makeway_decisions_total))",
        "max by (part) (makeway_part_work) == 0",
        "max by (party) (makeway_part_works) == 0",
        'max(makeway_machine_spend{periods="month"}) > 1',
        "vector(1) > 0",
    ],
)
def test_an_expression_that_prometheus_would_refuse_or_find_nothing_for_is_noticed(expression: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        assert_exported([expression])


def assert_exported(expressions: Iterable[str]) -> None:
    """Check that PromQL expressions can be parsed, types included, and that each series and label is exported."""
    series = exported()
    for expression in expressions:
        parsed = promql_parser.parse(expression)
        chosen = selectors(parsed)
        assert chosen, expression
        for one in chosen:
            assert one.name in series, expression
            labels = {matcher.name for matcher in one.matchers.matchers}
            assert labels <= series[one.name], expression
        for aggregation in found(parsed, promql_parser.AggregateExpr):
            grouped = set(aggregation.modifier.labels if aggregation.modifier else ())
            assert all(grouped <= series[one.name] for one in selectors(aggregation.expr)), expression


def found(expression: Any, kind: type[Any]) -> list[Any]:
    """Return the parts of an expression that are of a kind."""
    result: list[Any] = []

    def visit(part: Any) -> None:
        if isinstance(part, kind):
            result.append(part)

    promql_parser.walk(expression, visit)
    return result


def selectors(expression: Any) -> list[Any]:
    """Return what an expression selects, each once."""
    ranges = [one.vector_selector for one in found(expression, promql_parser.MatrixSelector)]
    return [*found(expression, promql_parser.VectorSelector), *ranges]


def labels_of(expression: Any) -> set[str]:
    """Return the labels of the result of an expression: those of its aggregation, of both sides of an operator."""
    if isinstance(expression, promql_parser.BinaryExpr):
        sides = (expression.lhs, expression.rhs)
        of_sides = [labels_of(one) for one in sides if not isinstance(one, promql_parser.NumberLiteral)]
        return set.intersection(*of_sides) if of_sides else set()
    if isinstance(expression, promql_parser.ParenExpr):
        return labels_of(expression.expr)
    if isinstance(expression, promql_parser.AggregateExpr):
        return set(expression.modifier.labels if expression.modifier else ())
    if isinstance(expression, promql_parser.Call):
        return set().union(*(labels_of(one) for one in expression.args))
    return set().union(*(exported()[one.name] for one in selectors(expression)))


def test_the_dashboards_states_of_gpus_are_those_of_the_service() -> None:
    text = (CHART / "files/dashboard.json").read_text(encoding="utf-8")
    shown = set(re.findall(r'makeway_team_gpus\{state=\\"(\w+)\\"\}', text))
    assert shown
    assert shown <= set(TeamUsage.model_fields)


def test_every_value_is_described() -> None:
    page = (CHART.parents[1] / "docs/reference/chart.md").read_text(encoding="utf-8")
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    common = {
        "resources",
        "nodeSelector",
        "tolerations",
        "affinity",
        "priorityClassName",
        "podLabels",
        "podAnnotations",
    }
    common |= {"extraEnv", "extraVolumes", "extraVolumeMounts", "serviceAccountAnnotations"}
    paths = {
        f"{name}.{inner}" if isinstance(part, dict) and name != "zeroToJupyterHub" else name
        for name, part in values.items()
        for inner in (part if isinstance(part, dict) else [""])
        if inner not in common
    }
    assert not {name for name in common if f"`{name}`" not in page}
    assert not {path for path in paths if f"`{path}`" not in page and f"`{path}." not in page}
