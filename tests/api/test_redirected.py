"""Answers that are not the service's: of a proxy, and of the Hub behind a proxy that was just replaced."""

from __future__ import annotations

import httpx2
import pytest
from makeway_api.errors import MakewayError
from makeway_api.routes import raise_for


@pytest.mark.parametrize(
    ("status", "said", "code"),
    [
        (302, "the proxy was replaced, and does not know the way to it yet", "unreachable"),
        (307, "the proxy was replaced, and does not know the way to it yet", "unreachable"),
        (503, "the service is starting or its proxy cannot reach it", "unreachable"),
        (418, "no reason given", "error"),
    ],
)
def test_what_answers_instead_of_the_service_is_said(status: int, said: str, code: str) -> None:
    with pytest.raises(MakewayError, match=said) as told:
        raise_for(httpx2.Response(status, text="<html>", request=httpx2.Request("GET", "http://hub/services/makeway")))
    assert told.value.code == code
