"""Connect this kernel to the quota service: address, token, and one client for everything."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import ParamSpec, TypeVar

from makeway_api.client import AsyncClient, Client
from makeway_api.errors import MakewayError
from makeway_api.models import Me

from .problems import Refused
from .words import typed

P = ParamSpec("P")
T = TypeVar("T")

NOT_CONFIGURED = (
    "this is not a Makeway notebook: MAKEWAY_URL is not set. Start one from the Hub, or set the environment variables "
    "MAKEWAY_URL (https://YOUR-HUB/services/makeway) and MAKEWAY_TOKEN (from the Hub's Token page), "
    'or call makeway.connect("URL", "TOKEN"). `%%train --local` works without.'
)

FRESH_TOKEN = "Restart your server from the Hub to get a new token, or set MAKEWAY_TOKEN to a fresh one."

_explicit: dict[str, str] = {}
_client: Client | None = None
_lock = threading.Lock()


def connect(url: str, token: str = "") -> None:
    """Use this address and token instead of MAKEWAY_URL and MAKEWAY_TOKEN (or JUPYTERHUB_API_TOKEN)."""
    _explicit.update(url=url, token=token)
    _forget()


def disconnect() -> None:
    """Close the connections and return to MAKEWAY_URL and MAKEWAY_TOKEN."""
    _explicit.clear()
    _forget()


def configured() -> bool:
    """Whether an address is configured."""
    return bool(_explicit.get("url") or os.environ.get("MAKEWAY_URL"))


def client() -> Client:
    """Return the client of this kernel; raise Refused with what to set if none is configured."""
    global _client
    url, token = _where()
    with _lock:
        if _client is None or (_client.url, _client.token) != (url, token):
            if _client is not None:
                _client.close()
            _client = Client(url, token)
            me.cache_clear()
        return _client


def key() -> tuple[str, str] | None:
    """Return the address and the token in use, to notice that one of them has changed; None if none is configured."""
    try:
        return _where()
    except Refused:
        return None


def async_client() -> AsyncClient:
    """Return a new client for one event loop, which has to close it."""
    return AsyncClient(*_where())


@lru_cache(maxsize=1)
def me() -> Me:
    """Return the caller as the service knows them, fetched once."""
    answer: Me = client().me()
    return answer


def explain(error: MakewayError) -> Refused:
    """Return an error of the service as the message that a notebook shows."""
    if isinstance(error, Refused):
        return error
    message = error.message
    if error.status == 401:
        message += " " + FRESH_TOKEN
        if _explicit:
            message += ' Here makeway.connect("URL", "TOKEN") chose the token: call it again with the fresh one.'
    for issue in error.errors[:3]:
        text = str(issue.get("message") or issue.get("msg") or "")
        if text and text not in message:
            message += f" {text}"
    return Refused(typed(message), code=error.code, status=error.status)


def explained(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a route of the service; its errors are raised as the messages that a notebook shows."""
    try:
        return call(*args, **kwargs)
    except MakewayError as error:
        raise explain(error) from None


def _where() -> tuple[str, str]:
    url = (_explicit.get("url") or os.environ.get("MAKEWAY_URL", "")).strip().rstrip("/")
    token = _explicit.get("token") or os.environ.get("MAKEWAY_TOKEN") or os.environ.get("JUPYTERHUB_API_TOKEN", "")
    if not url:
        raise Refused(NOT_CONFIGURED, code="not_configured")
    if not url.startswith(("http://", "https://")):
        raise Refused(f"MAKEWAY_URL is {url!r}; it must start with http:// or https://.", code="not_configured")
    if not token:
        raise Refused(
            "there is no token: set MAKEWAY_TOKEN to one from the Hub's Token page "
            "(a notebook started by the Hub has one).",
            code="not_configured",
        )
    return url, token


def _forget() -> None:
    global _client
    with _lock:
        if _client is not None:
            _client.close()
        _client = None
    me.cache_clear()
