"""Refusals of the API server in words, and failures that pass told from them."""

from __future__ import annotations

import json

import pytest
from kubernetes_asyncio.client.rest import ApiException
from makeway_spawner import api_refusal


def answer(status: int, message: str = "", reason: str = "Forbidden") -> ApiException:
    error = ApiException(status=status, reason=reason)
    error.body = json.dumps({"kind": "Status", "message": message, "code": status}) if message else None
    error.headers = {"Audit-Id": "7f"}
    return error


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (answer(403), True),
        (answer(422), True),
        (answer(401), True),
        (answer(404), True),
        (answer(409), False),
        (answer(429), False),
        (answer(500), False),
        (answer(503), False),
        (ApiException(), False),
        (OSError("no route"), False),
        (TimeoutError(), False),
    ],
)
def test_what_passes_is_told_from_a_refusal(error: Exception, refused: bool) -> None:
    assert api_refusal.refused(error) == refused


QUOTA = 'pods "jupyter-ana" is forbidden: exceeded quota: few, requested: pods=1, used: pods=0, limited: pods=0'
RIGHT = 'pods is forbidden: User "system:serviceaccount:lab:hub" cannot list resource "pods" in the namespace "lab"'
DENIED = 'admission webhook "site" denied the request: no latest tags'
CLASS = 'pods "jupyter-ana" is forbidden: no PriorityClass with name gone was found'


@pytest.mark.parametrize(
    ("message", "todo"),
    [
        (QUOTA, "quota of this namespace"),
        (RIGHT, "this right"),
        (CLASS, "create this priority class"),
        (DENIED, "does not accept in the namespace lab"),
    ],
)
def test_a_refusal_is_what_kubernetes_said_and_what_to_do(message: str, todo: str) -> None:
    text = api_refusal.start_sentence(answer(403, message), "lab")
    assert text.startswith(f"Kubernetes refuses the notebook's pod: {message}. ")
    assert todo in text
    assert "Audit-Id" not in text


def test_an_answer_without_a_status_has_its_reason() -> None:
    assert api_refusal.api_message(answer(403)) == "Forbidden"
    for message in (api_refusal.start_sentence(answer(403), "lab"), api_refusal.stop_sentence(answer(403), "lab/ana")):
        assert "has to give the Hub's account the right to list and watch pods and events" in message
    broken = answer(502, reason="Bad Gateway")
    broken.body = "<html>"
    assert api_refusal.start_sentence(broken, "lab") == (
        "Kubernetes could not create the notebook's pod: Bad Gateway (status 502). Start it again."
    )
    assert "status 500" in api_refusal.api_message(answer(500, reason=""))


def test_credentials_that_are_not_accepted_are_no_missing_right() -> None:
    expired = answer(401, "Unauthorized", "Unauthorized")
    for message in (api_refusal.start_sentence(expired, "lab"), api_refusal.stop_sentence(expired, "lab/jupyter-ana")):
        assert message.endswith(
            "An administrator has to restart the Hub: Kubernetes does not accept its credentials any more."
        )
        assert "right" not in message


def test_a_stop_that_is_refused_names_the_pod() -> None:
    message = api_refusal.stop_sentence(answer(403, RIGHT), "lab/jupyter-ana")
    assert RIGHT in message
    assert "lab/jupyter-ana" in message
