"""The picker's HTML: offers, the preselected row, and user input that never becomes markup."""

from __future__ import annotations

import re
from typing import Any

import pytest
from makeway_api.models import Image, OfferTable
from makeway_spawner.options import Choice
from makeway_spawner.picker import Picker, drawn
from spawner.quota_fake import QuotaFake, usage

PICKER = Picker("lea", "/hub/", "/services/makeway/")
EVIL = "<script>alert('x')</script>\"'&"


def table(user: str = "lea", **changes: Any) -> OfferTable:
    return QuotaFake().offers(user).model_copy(update=changes)


def radio(html: str, queue: str) -> str:
    result = re.search(rf'<input[^>]*type="radio"[^>]*value="{queue}"[^>]*>', html)
    assert result, f"no radio button for {queue}"
    return result[0]


def checked(html: str) -> list[str]:
    return re.findall(r'type="radio"[^>]*value="([^"]*)"\s+checked', html)


@pytest.mark.covers("N03")
def test_every_row_shows_what_can_be_had_now_and_which_jobs_make_way() -> None:
    html = PICKER.render(table(), None, {})
    assert "Ready now" in html
    assert "Ready in ≤ 30 s" in html
    assert "job resnet of ana (rnd, 3 GPUs) will be asked to make way" in html
    assert "4 of your 5 guaranteed GPUs are in use: lea 3, mia 1" in html
    assert "virtual GPUs" in html


@pytest.mark.parametrize(("seconds", "badge"), [(180, "Ready in about 3 min"), (None, "Starts a machine")])
def test_a_profile_for_which_a_machine_would_be_started_can_be_chosen(seconds: int | None, badge: str) -> None:
    message = "A machine of type g2 would be started: about 3.10 EUR/h."
    update = {"code": "ready_after_launch", "seconds": seconds, "message": message, "reason": None}
    offers = [offer.model_copy(update=update) for offer in table().offers if offer.profile == "gpu2"]
    html = PICKER.render(table(offers=offers), None, {})
    assert f'<span class="badge mw-badge">{badge}</span>' in html
    assert f'<span class="mw-message small">{message}</span>' in html
    [chosen] = checked(html)
    assert chosen.endswith("/gpu2")
    assert "disabled" not in radio(html, chosen)


def test_a_cluster_that_cannot_be_read_is_said() -> None:
    message = "Nodes and jobs are shown as they were seen last, and nothing starts: it is <away>."
    html = PICKER.render(table(problem=message), None, {})
    assert 'id="mw-problem" role="status">Nodes and jobs' in html
    assert "it is &lt;away&gt;." in html
    assert 'id="mw-problem" role="status" hidden></div>' in PICKER.render(table(), None, {})


def test_a_refused_row_offers_a_preemptible_session_only_where_that_helps() -> None:
    html = PICKER.render(table(), None, {})
    rows = {m[1]: m[0] for m in re.finditer(r'<div class="mw-row" data-queue="([^"]*)".*?</div>', html, re.S)}
    assert re.search(r'class="mw-preemptible small" >', rows["rnd/gpu2"])
    assert re.search(r'class="mw-preemptible small" hidden>', rows["rnd/gpu1"])


def test_a_refused_row_without_help_cannot_be_chosen() -> None:
    offers = table().offers
    offers[-1] = offers[-1].model_copy(update={"reason": offers[-1].reason.model_copy(update={"code": "limit"})})
    html = PICKER.render(table(offers=offers), None, {})
    assert "disabled" in radio(html, "rnd/gpu2")
    assert "Not available" in html


@pytest.mark.covers("N01")
def test_a_user_of_no_team_sees_cpu_profiles_only_and_why() -> None:
    html = Picker("guest", "/hub/", "/services/makeway/").render(table("guest"), None, {})
    assert re.findall(r'type="radio"[^>]*value="([^"]*)"', html) == ["/cpu"]
    assert "You are in no team that has GPUs" in html


@pytest.mark.covers("N04")
@pytest.mark.parametrize(
    ("remembered", "marked", "note"),
    [
        (Choice("gpu1", "rnd"), "rnd/gpu1", ""),
        (
            Choice("gpu2", "rnd"),
            "/cpu",
            "Your last choice was Two GPUs for Research &amp; Development. 4 of your 5 guaranteed GPUs are in use",
        ),
        (Choice("gpu2", "rnd", True), "rnd/gpu2", ""),
        (
            Choice("gpu7", "rnd"),
            "/cpu",
            "Your last choice was gpu7 for Research &amp; Development. It is no longer offered to you.",
        ),
        (None, "/cpu", ""),
    ],
)
def test_the_last_choice_is_preselected_while_it_is_valid(remembered: Choice | None, marked: str, note: str) -> None:
    html = PICKER.render(table(), remembered, {})
    assert checked(html) == [marked]
    assert note in html
    assert bool(note) == ('id="mw-note"' in html)


@pytest.mark.covers("N02")
def test_a_link_preselects_its_profile_and_one_to_a_foreign_profile_is_refused() -> None:
    assert checked(PICKER.render(table(), None, {"profile": "gpu1", "team": "rnd"})) == ["rnd/gpu1"]
    assert checked(PICKER.render(table(), Choice("cpu"), {"profile": "gpu1"})) == ["devops/gpu1"]
    html = PICKER.render(table(), None, {"profile": EVIL, "team": EVIL})
    assert "which is not available to lea" in html
    assert EVIL not in html


def test_user_input_is_escaped() -> None:
    old = table()
    evil = table(
        profiles=[p.model_copy(update={"title": EVIL, "description": EVIL}) for p in old.profiles],
        offers=[o.model_copy(update={"message": EVIL}) for o in old.offers],
        usage=[u.model_copy(update={"title": EVIL}) for u in old.usage],
        ticket=EVIL,
    )
    html = Picker(EVIL, "/hub/", "/services/makeway/").render(evil, None, {})
    assert "<script>alert" not in html
    assert html.count("<script") == 1  # our own
    assert " onclick" not in html
    assert "style=" not in html  # inline styles would need a weaker content security policy


def test_without_the_service_only_cpu_profiles_are_offered_with_the_reason() -> None:
    html = PICKER.without_service("The quota service does not answer.", {"cpu": "CPU only"})
    assert checked(html) == ["/cpu"]
    assert "The quota service does not answer." in html
    assert "data-live" not in html


@pytest.mark.covers("N13")
def test_the_bar_ends_at_the_limit_and_has_a_tick_at_the_reservation() -> None:
    (rnd,) = drawn([usage("rnd")])
    assert rnd.parts == (("guaranteed", 0.0, 44.44), ("in-quota", 44.44, 11.11), ("borrowed", 55.56, 44.44))
    assert (rnd.mark, rnd.end) == (55.56, 100.0)
    assert rnd.bar.summary == "9 in use · 5 reserved · limit 9"
    (boundless,) = drawn([usage("rnd").model_copy(update={"limit": None})])
    assert boundless.bar.summary.endswith("no limit")
    assert drawn([usage("devops").model_copy(update={"reserved": 0, "limit": 0})])[0].mark is None


def test_bars_of_several_teams_share_one_scale() -> None:
    small, large = drawn([usage("rnd"), usage("rnd").model_copy(update={"limit": 18})])
    assert (small.end, large.end) == (50.0, 100.0)
    assert small.parts == large.parts


def with_images(*images: Image) -> OfferTable:
    profiles = [p.model_copy(update={"images": list(images)}) if p.name == "gpu1" else p for p in table().profiles]
    return table(profiles=profiles)


TORCH = Image(name="torch", title="PyTorch", description="Version <2>", image="site/torch:2")
PLAIN = Image(name="plain", title="Plain", image="site/plain:1", default=True)


def selected(html: str) -> list[str]:
    return re.findall(r'<option value="([^"]*)" selected>', html)


@pytest.mark.covers("N04")
def test_a_profile_with_images_has_a_list_and_the_last_choice_is_selected_while_it_is_offered() -> None:
    offers = with_images(TORCH, PLAIN)
    html = PICKER.render(offers, None, {})
    assert re.findall(r'<select [^>]*name="([^"]*)"', html) == ["image:gpu1"]
    assert "PyTorch: Version &lt;2&gt;" in html
    assert selected(html) == ["plain"]
    assert selected(PICKER.render(offers, Choice("gpu1", "rnd", image="torch"), {})) == ["torch"]
    assert selected(PICKER.render(offers, Choice("gpu1", "rnd", image="gone"), {})) == ["plain"]
    assert selected(PICKER.render(offers, Choice("gpu2", "devops", image="torch"), {})) == ["plain"]


def test_one_image_is_no_choice() -> None:
    assert "<select" not in PICKER.render(with_images(PLAIN), None, {})


def test_an_administrator_without_a_team_is_told_what_they_can_do_themselves() -> None:
    html = Picker("root", "/hub/", "/services/makeway/", admin=True).render(table("guest"), None, {})
    assert "Ask an administrator" not in html
    assert 'href="/hub/admin"' in html
    assert "Ask an administrator" in Picker("guest", "/hub/", "/services/makeway/").render(table("guest"), None, {})
