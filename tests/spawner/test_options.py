"""Options from forms, links and the API become a choice or are refused with a message."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makeway_api.models import Image, Offer, OfferTable
from makeway_spawner.options import Choice, check, read_form, read_options, without_choice, without_images
from makeway_spawner.refusal import Refused
from spawner.quota_fake import PROFILES, QuotaFake

LEA = QuotaFake().offers("lea")
GUEST = QuotaFake().offers("guest")


@pytest.mark.parametrize(
    ("form", "choice"),
    [
        ({"choice": ["rnd/gpu1"]}, Choice("gpu1", "rnd")),
        ({"choice": ["/cpu"]}, Choice("cpu")),
        ({"profile": ["gpu1"], "team": ["rnd"]}, Choice("gpu1", "rnd")),
        ({"profile": ["gpu1"], "team": ["rnd"], "preemptible": ["on"]}, Choice("gpu1", "rnd", True)),
        ({"choice": ["rnd/gpu2"], "preemptible": ["rnd/gpu2"]}, Choice("gpu2", "rnd", True)),
        ({"choice": ["rnd/gpu2"], "preemptible": ["devops/gpu2"]}, Choice("gpu2", "rnd", False)),
        ({"choice": ["rnd/gpu1"], "something": ["else"]}, Choice("gpu1", "rnd")),
    ],
)
def test_a_form_is_read_as_a_choice_of_team_and_profile(form: dict[str, Any], choice: Choice) -> None:
    assert read_form(form) == choice


@pytest.mark.parametrize(
    "options",
    [
        {"profile": "gpu1", "team": "rnd"},
        {"user_options": {"profile": "gpu1", "team": "rnd"}},
        {"profile": ["gpu1"], "team": ["rnd"], "preemptible": "false"},
        {"choice": "rnd/gpu1"},
    ],
)
def test_options_of_the_rest_api_are_read_also_nested(options: Any) -> None:
    assert read_options(options) == Choice("gpu1", "rnd")


IMAGES = [
    Image(name="torch", title="PyTorch", image="site/torch:2"),
    Image(name="plain", title="Plain", image="site/plain:1", default=True),
]


def with_images(table: OfferTable) -> OfferTable:
    profiles = [
        profile.model_copy(update={"images": IMAGES, "image": IMAGES[1].image}) if profile.name == "gpu1" else profile
        for profile in table.profiles
    ]
    return table.model_copy(update={"profiles": profiles})


def test_the_image_is_that_of_the_card_that_is_chosen() -> None:
    form = {"choice": ["rnd/gpu1"], "image:gpu1": ["torch"], "image:gpu2": ["plain"]}
    assert read_form(form) == Choice("gpu1", "rnd", image="torch")
    assert read_options(Choice("gpu1", "rnd", image="torch").options()) == Choice("gpu1", "rnd", image="torch")
    assert "image" not in Choice("gpu1", "rnd").options()


@pytest.mark.parametrize("image", ["torch", "site/torch:2", "site/plain:1", ""])
def test_an_image_that_the_profile_offers_is_accepted_by_name_and_by_reference(image: str) -> None:
    assert check(Choice("gpu1", "rnd", image=image), with_images(LEA)).image == image


@pytest.mark.covers("N02")
def test_an_image_that_the_profile_does_not_offer_is_refused_with_those_that_it_does() -> None:
    with pytest.raises(Refused, match=r"offers no image 'evil', but PyTorch \(torch\) and Plain \(plain\)\."):
        check(Choice("gpu1", "rnd", image="evil"), with_images(LEA))
    with pytest.raises(Refused, match="it offers no choice of images"):
        check(Choice("gpu1", "rnd", image="torch"), without_images(with_images(LEA)))
    with pytest.raises(Refused, match="is not the name of an image") as refused:
        read_options({"profile": "gpu1", "image": ["a\nb"]})
    assert refused.value.status_code == 400


@pytest.mark.covers("N02")
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"choice": ["gpu1"]},
        {"choice": ["<script>alert(1)</script>/gpu1"]},
        {"choice": ["rnd/"]},
        {"profile": ["../../etc/passwd"]},
        {"profile": ["x" * 300]},
        {"profile": ["gpu1"], "preemptible": ["maybe"]},
        {"profile": ["gpu1"], "team": ["R&D"]},
        {"profile": "gpu\x001"},
    ],
)
def test_invalid_options_are_refused_with_the_reason(form: dict[str, Any]) -> None:
    with pytest.raises(Refused) as refused:
        read_form(form)
    assert refused.value.status_code == 400
    assert len(refused.value.jupyterhub_message) > 20


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["profile", "team", "preemptible", "choice", "user_options", "x"])


@given(st.dictionaries(KEYS, JSON, max_size=4) | JSON)
def test_any_json_is_read_or_refused_and_never_an_error_of_ours(options: Any) -> None:
    with contextlib.suppress(Refused):
        choice = read_options(options)
        assert read_options(choice.options()) == choice


def test_the_only_team_is_filled_in_and_two_have_to_be_chosen_from() -> None:
    assert check(Choice("gpu1"), QuotaFake().offers("bo")) == Choice("gpu1", "devops")
    with pytest.raises(Refused, match="Choose a team for One GPU: devops, rnd"):
        check(Choice("gpu1"), LEA)


@pytest.mark.covers("N01", "N02")
@pytest.mark.parametrize(
    ("choice", "table", "words"),
    [
        (Choice("gpu1", "rnd"), GUEST, "not available to guest: you are in no team"),
        (Choice("gpu9", "rnd"), LEA, "The profile gpu9 is not available to lea"),
        (Choice("gpu1", "finance"), LEA, "lea is not a member of the team finance"),
    ],
)
def test_an_outsider_is_refused_with_403_and_the_alternatives(choice: Choice, table: Any, words: str) -> None:
    with pytest.raises(Refused) as refused:
        check(choice, table)
    assert refused.value.status_code == 403
    assert words in refused.value.jupyterhub_message


def test_what_the_service_refuses_now_is_refused_with_its_numbers_unless_preemptible_helps() -> None:
    with pytest.raises(Refused, match="4 of your 5 guaranteed GPUs are in use: lea 3, mia 1"):
        check(Choice("gpu2", "rnd"), LEA)
    assert check(Choice("gpu2", "rnd", True), LEA).preemptible


def only(user: str, *pairs: tuple[str | None, str]) -> OfferTable:
    """Return the offers of a user, without profiles that have no GPUs."""
    table = QuotaFake().offers(user)
    offers = [Offer(profile=profile, team=team, code="ready_now", message="") for team, profile in pairs]
    profiles = [p for p in PROFILES if p.name in {profile for _, profile in pairs}]
    return table.model_copy(update={"offers": offers, "profiles": profiles})


def test_a_start_without_a_choice_gets_the_only_offer_where_all_have_gpus() -> None:
    assert without_choice(only("bo", ("devops", "gpu1"))) == Choice("gpu1", "devops")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (only("bo", ("devops", "gpu1"), ("devops", "gpu2")), "bo chooses one on the start page, .* (gpu1, gpu2)"),
        (only("zoe"), "zoe is in no team, and the policy opens no profile to them"),
    ],
)
def test_a_start_without_a_choice_is_refused_with_what_the_person_can_have(table: OfferTable, words: str) -> None:
    with pytest.raises(Refused, match=words.replace("(", r"\(").replace(")", r"\)")):
        without_choice(table)
