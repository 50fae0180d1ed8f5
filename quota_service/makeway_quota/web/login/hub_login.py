"""Use the Hub as directory: OAuth login for browsers, tokens for programs, groups for teams."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

from fastapi import Request, Response
from fastapi.responses import RedirectResponse
from jupyterhub.services.auth import HubOAuth
from makeway_api.errors import MakewayError
from tornado.web import HTTPError

from ...control.hub.client import HubApi, HubUnreachable, HubUser
from ...control.hub.people import People
from ...policy.members import SERVICE
from ...services import Caller
from ..settings import WebSettings
from .auth import SCOPE, Authenticator, is_https
from .tickets import same

STATE_COOKIE = "makeway-oauth-"
STATE_SECONDS = 600
MAX_TOKENS = 20_000
"""Tokens whose users are remembered."""


class HubDirectory:
    """The directory of the Hub, with its answers cached for some seconds; never blocks the event loop."""

    def __init__(self, settings: WebSettings, hub: HubOAuth | None = None, people: People | None = None) -> None:
        """`people`: who is told of every user, so that no one is answered under a name that meant another person."""
        self.settings = settings
        self._people = people
        self._identities: dict[str, str] = {}
        """token, as a digest, to the identity of its user: a token is one user's for ever, whatever they are called"""
        self.hub = hub or HubOAuth(cache_max_age=settings.auth_cache_seconds)
        self.api = HubApi(self.hub.api_url, self.hub.api_token, keep_seconds=settings.auth_cache_seconds)

    async def caller_of(self, token: str, session_id: str) -> Caller | None:
        """Return the holder of a token, as the Hub says."""
        if not token.isascii() or not token.isprintable():
            return None
        try:
            model = await self.hub.user_for_token(token, session_id=session_id, sync=False)
        except HTTPError as error:
            raise hub_trouble(error) from error
        if not model:
            return None
        caller = caller_of(model)
        if self._people is None or caller.kind != "user":
            return caller
        name = await self._recorded_name(self._people, caller, token)
        return None if name is None else replace(caller, name=name)

    async def _recorded_name(self, people: People, caller: Caller, token: str) -> str | None:
        """Record the caller, and return their present name once their work is filed under it; None: no such user."""
        key = hashlib.sha256(token.encode()).hexdigest()
        try:
            identity = self._identities.get(key)
            if identity is None:
                user = await self.api.user(caller.name, fresh=True)
                if user is None:
                    raise HubUnreachable(f"it has no user {caller.name} just now")
                identity = user.identity
                if len(self._identities) > MAX_TOKENS:
                    self._identities.clear()
                self._identities[key] = identity
            return await people.record_user(HubUser(caller.name, tuple(caller.groups), identity=identity))
        except HubUnreachable as error:
            raise hub_trouble(error) from error

    async def groups_of(self, user: str) -> Sequence[str]:
        """Return a user's groups by the service's own token; an unknown user is in no group."""
        try:
            known = await self.api.user(user)
            if known is not None and self._people is not None and await self._people.record_user(known) != user:
                return ()
        except HubUnreachable as error:
            raise hub_trouble(error) from error
        return known.groups if known else ()

    async def login(self, request: Request, authenticator: Authenticator) -> Response:
        """Start OAuth: keep the wanted page in a signed cookie and redirect to the Hub."""
        nonce = secrets.token_urlsafe(16)
        params = {"state": nonce}
        verifier = None
        if getattr(self.hub, "pkce_enabled", False):  # JupyterHub 6
            verifier, challenge, method = self.hub.generate_pkce_code_challenge()
            params |= {"code_challenge": challenge, "code_challenge_method": method}
        joiner = "&" if "?" in self.hub.login_url else "?"
        response = RedirectResponse(self.hub.login_url + joiner + urlencode(params), status_code=302)
        state = {"nonce": nonce, "next": self._next(request), "verifier": verifier}
        name, path = authenticator.cookie_name(STATE_COOKIE + nonce[:8], request)
        response.set_cookie(
            name,
            authenticator.signer.sign("oauth", state, STATE_SECONDS),
            max_age=STATE_SECONDS,
            path=path,
            httponly=True,
            samesite="lax",
            secure=is_https(request),
        )
        return response

    async def logged_in(self, request: Request, authenticator: Authenticator) -> Response:
        """Finish OAuth: check the state, exchange the code for a token, set the cookie, redirect to the page."""
        query = request.query_params
        if "error" in query:
            raise _login_failed(query.get("error_description") or query["error"])
        sent, code = query.get("state", ""), query.get("code", "")
        cookie, path = authenticator.cookie_name(STATE_COOKIE + sent[:8], request)
        state = authenticator.signer.read("oauth", request.cookies.get(cookie, ""))
        if not code or not isinstance(state, dict) or not same(state["nonce"], sent):
            raise _login_failed("it took longer than ten minutes, or was started in another browser")
        token = await self._exchange_code(code, state["verifier"])
        response = RedirectResponse(state["next"], status_code=302)
        authenticator.admit(response, request, token)
        response.delete_cookie(cookie, path=path, secure=is_https(request))
        return response

    async def close(self) -> None:
        """Close the connections."""
        await self.api.close()

    async def _exchange_code(self, code: str, verifier: str | None) -> str:
        extra: Mapping[str, Any] = {"code_verifier": verifier} if verifier else {}
        try:
            return str(await self.hub.token_for_code(code, sync=False, **extra))
        except HTTPError as error:
            raise _login_failed(error.log_message or "the Hub refused the code") from error

    def _next(self, request: Request) -> str:
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return path if path.startswith(self.settings.prefix) and not path.startswith("//") else self.settings.prefix


def caller_of(model: Mapping[str, Any]) -> Caller:
    """Return the caller of the Hub's user model; the admin scope makes an administrator of Makeway.

    A service of the Hub is called `service/NAME`: it has no namesake, and what it submits is no user's work.
    """
    held = model.get("scopes") or ()
    scopes = frozenset(scope for scope in held if scope.startswith(SCOPE) or scope == "read:metrics")
    kind, name = str(model.get("kind") or "user"), str(model["name"])
    return Caller(
        name=name if kind == "user" else SERVICE + name,
        admin=f"{SCOPE}admin" in scopes,
        groups=frozenset(model.get("groups") or ()),
        scopes=scopes,
        kind=kind,
    )


def hub_trouble(error: Exception) -> MakewayError:
    """Make the error for a Hub that cannot be reached."""
    why = getattr(error, "log_message", None) or str(error) or type(error).__name__
    return MakewayError(
        f"JupyterHub cannot be asked who you are ({why}). Running jobs and notebooks continue; try again in a moment.",
        code="hub_unreachable",
        status=503,
    )


def _login_failed(why: str) -> MakewayError:
    return MakewayError(f"Logging in did not work: {why}. Open the page again.", code="login_failed", status=403)
