"""Whatever answers in place of Kubernetes' API server, a refused notebook has a page with a sentence."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes_asyncio.client.rest import ApiException
from makeway_spawner.api_refusal import api_message, lacks_permission, refused, start_sentence, stop_sentence

BODIES: list[Any] = [
    "[" * 100_000,
    '{"message": ' + "[" * 100_000,
    '{"message": 1' + "0" * 5000 + "}",
    '{"message": {"a": 1}}',
    '{"message": "\\ud800 half"}',
    '{"message": "' + "x" * 10**6 + '"}',
    '{"message": " "}',
    b"\xff\xfe",
    b'{"message": "said"}',
    "NaN",
    "<html>502</html>",
    7,
    None,
]


@pytest.mark.parametrize("status", [403, 0, None, "403", 99999])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: str(body)[:15])
def test_any_answer_of_the_api_server_becomes_a_sentence(body: Any, status: Any) -> None:
    error = ApiException(status=status, reason="Forbidden by it")
    error.body = body
    message = api_message(error)
    assert 0 < len(message) <= 2000
    for sentence in (message, start_sentence(error, "jobs"), stop_sentence(error, "p")):
        sentence.encode()
    assert isinstance(refused(error), bool)
    assert isinstance(lacks_permission(error), bool)
