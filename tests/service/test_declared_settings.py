"""A setting is declared once: its variable, its name in a file, the reference page and the chart follow from that."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import make_reference
import pytest
from makeway_api.settings import camel, declared, setting
from makeway_hub.settings import Settings
from makeway_quota import settings
from makeway_quota.settings import ServiceSettings, load

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class More(ServiceSettings):
    """The service's settings with one more, as a change would add it."""

    snooze_seconds: float = setting(7.5, "The loop sleeps this long.", min=1.0, max=60.0)


@pytest.fixture
def more(monkeypatch: pytest.MonkeyPatch) -> type[More]:
    monkeypatch.setattr(settings, "ServiceSettings", More)
    return More


def test_a_new_setting_is_read_from_its_variable_and_from_a_file(more: type[More], tmp_path: Path) -> None:
    file = tmp_path / "settings.py"
    file.write_text("c.QuotaService.snooze_seconds = 12\n", encoding="utf-8")
    given = [load(environ={}), load(str(file), {}), load(str(file), {"MAKEWAY_SNOOZE_SECONDS": "20"})]
    assert [result.snooze_seconds for result in given] == [7.5, 12.0, 20.0]


@pytest.mark.parametrize("wrong", ["0", "61", "soon"])
def test_a_wrong_value_of_a_new_setting_is_refused_with_its_bounds(more: type[More], wrong: str) -> None:
    with pytest.raises(ValueError) as refused:
        load(environ={"MAKEWAY_SNOOZE_SECONDS": wrong})
    assert str(refused.value) == (
        f"MAKEWAY_SNOOZE_SECONDS={wrong!r} is not accepted: use a number from 1 to 60. The loop sleeps this long."
    )


def test_a_new_setting_is_on_the_reference_page_and_in_the_chart(more: type[More]) -> None:
    line = "| `MAKEWAY_SNOOZE_SECONDS` | `snooze_seconds` | `7.5` | The loop sleeps this long. |"
    assert line in make_reference.service_settings().splitlines()
    before = (ROOT / "helm/makeway/values.schema.json").read_text(encoding="utf-8")
    after = json.loads(make_reference.chart_schema(before))
    values = after["properties"]["service"]["properties"]["settings"]["properties"]
    assert values["snoozeSeconds"] == {"type": "number", "minimum": 1, "maximum": 60}


@pytest.mark.parametrize("kind", [ServiceSettings, Settings], ids=["service", "portal"])
def test_every_setting_has_a_help_that_is_a_sentence_and_a_default_that_it_accepts(kind: type) -> None:
    for name, result in declared(kind).items():
        assert re.fullmatch(r"[\w.].*[.)]", result.help, re.DOTALL), name
        low, high = result.min, result.max
        if not isinstance(result.default, str):
            assert low is None or result.default >= low, name
            assert high is None or result.default <= high, name
        assert not result.choices or result.default in result.choices, name


def test_a_setting_of_several_words_has_the_charts_spelling() -> None:
    assert camel("max_kept_share_percent") == "maxKeptSharePercent"


def test_values_have_the_units_of_their_fields() -> None:
    given = {"MAKEWAY_MAX_FILES_MB": "3", "MAKEWAY_LARGE_FILE_KB": "2", "MAKEWAY_MAX_KEPT_TEAM_MB": "10"}
    result = load(environ={**given, "MAKEWAY_MAX_KEPT_SHARE_PERCENT": "30", "MAKEWAY_KUBE_TOLERATIONS": " a, b=c ,"})
    assert (result.max_files_bytes, result.large_file_bytes) == (3_000_000, 2048)
    assert (result.max_kept_team_bytes, result.max_kept_share_bytes) == (10_000_000, 3_000_000)
    assert result.kubernetes.tolerations == ("a", "b=c")
    assert load(environ={"MAKEWAY_KEEP": ""}).keep is False, "an empty variable is none"


@pytest.mark.parametrize(
    ("url", "public"), [("http://[::1]:8765/", "[::1]:8765"), ("http://10.0.0.1:80/", "10.0.0.1:80")]
)
def test_the_address_of_the_service_has_brackets_around_one_of_ipv6(url: str, public: str) -> None:
    result = load(environ={"JUPYTERHUB_SERVICE_URL": url, "JUPYTERHUB_SERVICE_PREFIX": "/services/makeway/"})
    assert result.public_url == f"http://{public}/services/makeway"
