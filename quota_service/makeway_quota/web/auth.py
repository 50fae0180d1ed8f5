"""Who is asking: a Hub token in a header, or the cookie of somebody who logged in through the Hub."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fastapi import Request, Response
from fastapi.responses import RedirectResponse
from makeway_api.errors import MakewayError

from .ports import Caller
from .settings import WebSettings
from .tickets import Signer, same

SCOPE = "custom:makeway:"
COOKIE = "makeway-login"
COOKIE_SECONDS = 14 * 86_400
_HEADER = re.compile(r"(?:token|bearer)\s+(\S+)\s*", re.IGNORECASE)
_READS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class Visitor:
    """A caller and how they came; `xsrf` is what their pages must send back."""

    caller: Caller
    by_cookie: bool = False
    xsrf: str = ""


class Directory(Protocol):
    """Knows tokens and groups: the Hub in production, a fixed table in tests and benchmarks."""

    async def who(self, token: str, session_id: str) -> Caller | None:
        """Name the holder of a token, or None; MakewayError 503 when nobody can say."""

    async def groups_of(self, user: str) -> Sequence[str]:
        """Tell the groups that a user is in now."""

    async def login(self, request: Request, authenticator: Authenticator) -> Response:
        """Send somebody without a cookie to where they can log in."""

    async def logged_in(self, request: Request, authenticator: Authenticator) -> Response:
        """Take them back, with a cookie."""

    async def close(self) -> None:
        """Let go of connections."""


class Authenticator:
    """Reads a visitor from a request, refuses forged ones, and issues the login cookie."""

    def __init__(self, settings: WebSettings, directory: Directory) -> None:
        self.settings = settings
        self.directory = directory
        self.signer = Signer(settings.secret)

    async def visitor(self, request: Request) -> Visitor | None:
        """Say who asks; None for a stranger. A wrong token is 401, a forged cookie request 403."""
        session_id = request.cookies.get("jupyterhub-session-id", "")
        header = request.headers.get("authorization")
        if header is not None:
            found = _HEADER.fullmatch(header)
            caller = await self.directory.who(found.group(1), session_id) if found else None
            if caller is None:
                raise MakewayError(
                    "The token in the Authorization header is not valid (any more). "
                    "Make a new one on the Hub's token page and send it as `Authorization: token …`.",
                    code="unauthorized",
                    status=401,
                )
            return Visitor(caller)
        token = self.signer.read("cookie", request.cookies.get(COOKIE, ""))
        if not isinstance(token, str) or (caller := await self.directory.who(token, session_id)) is None:
            return None
        xsrf = self.signer.digest("xsrf", f"{session_id}:{hashlib.sha256(token.encode()).hexdigest()}")
        await self._check_forgery(request, xsrf)
        return Visitor(caller, by_cookie=True, xsrf=xsrf)

    def admit(self, response: Response, request: Request, token: str) -> None:
        """Give the browser its cookie."""
        response.set_cookie(
            COOKIE,
            self.signer.sign("cookie", token, COOKIE_SECONDS),
            max_age=COOKIE_SECONDS,
            path=self.settings.prefix,
            httponly=True,
            samesite="lax",
            secure=is_https(request),
        )

    async def _check_forgery(self, request: Request, xsrf: str) -> None:
        """Cookies travel with every request of the browser, also with those of notebooks at the same origin."""
        mode = request.headers.get("sec-fetch-mode", "unspecified")
        if request.method in _READS and not self._is_api(request) and mode in ("navigate", "unspecified"):
            return
        sent = request.headers.get("x-xsrftoken") or request.query_params.get("_xsrf") or ""
        if not sent and _is_form(request):
            sent = str((await request.form()).get("_xsrf", ""))
        if not same(xsrf, sent):
            raise MakewayError(
                "This request came with a login cookie but without the page's own token (_xsrf). "
                "Reload the page and try again; programs use an API token instead.",
                code="xsrf",
                status=403,
            )

    def _is_api(self, request: Request) -> bool:
        return request.url.path.startswith(f"{self.settings.api}/")


def may(caller: Caller, *scopes: str) -> bool:
    """Say whether the caller has one of the scopes, with or without a filter; admin stands for all but `reserve`."""
    held = {scope.removeprefix(SCOPE).partition("!")[0] for scope in caller.scopes if scope.startswith(SCOPE)}
    if caller.admin and any(scope != "reserve" for scope in scopes):
        return True
    return any(scope in held for scope in scopes)


def needs(*scopes: str) -> Callable[[Request], Awaitable[Caller]]:
    """Make the dependency of a route: the caller, who holds one of `scopes`."""

    async def caller(request: Request) -> Caller:
        authenticator: Authenticator = request.app.state.authenticator
        visitor = await authenticator.visitor(request)
        if visitor is None:
            raise MakewayError(
                "Log in first, or send a token of the Hub: `Authorization: token …`.", code="unauthorized", status=401
            )
        if not may(visitor.caller, *scopes):
            raise refusal(visitor.caller, scopes)
        return visitor.caller

    return caller


def refusal(caller: Caller, scopes: Sequence[str]) -> MakewayError:
    """Say which scope is missing and who can give it."""
    names = " or ".join(f"{SCOPE}{scope}" for scope in scopes)
    return MakewayError(
        f"{caller.name} may not do this: it takes the scope {names}. An administrator of the Hub grants it "
        "with a role; a token must list it too.",
        code="forbidden",
        status=403,
        numbers={"scopes": [f"{SCOPE}{scope}" for scope in scopes]},
    )


def is_https(request: Request) -> bool:
    """Say whether the browser's own connection is encrypted (proxies say so in a header)."""
    proto = request.headers.get("x-scheme") or request.headers.get("x-forwarded-proto") or request.url.scheme
    return proto.partition(",")[0].strip().lower() == "https"


def _is_form(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return request.method == "POST" and kind in ("application/x-www-form-urlencoded", "multipart/form-data")


class TokenAuth:
    """A fixed table of tokens and groups, for tests and benchmarks that run the app in their own process.

    Nothing that the service reads can switch it on.
    """

    def __init__(self, tokens: Mapping[str, Caller], groups: Mapping[str, Sequence[str]] | None = None) -> None:
        self.tokens = dict(tokens)
        self.groups = dict(groups or {})

    async def who(self, token: str, session_id: str) -> Caller | None:
        """Look the token up."""
        return self.tokens.get(token)

    async def groups_of(self, user: str) -> Sequence[str]:
        """Look the user up, in the table or among the callers."""
        known = next((caller.groups for caller in self.tokens.values() if caller.name == user), frozenset())
        return self.groups.get(user, sorted(known))

    async def login(self, request: Request, authenticator: Authenticator) -> Response:
        """Log in with ?login_token=…: what a test's browser opens first."""
        token = request.query_params.get("login_token", "")
        if token not in self.tokens:
            raise MakewayError("Log in first.", code="unauthorized", status=401)
        response = RedirectResponse(request.url.path, status_code=302)
        authenticator.admit(response, request, token)
        return response

    async def logged_in(self, request: Request, authenticator: Authenticator) -> Response:
        """There is nothing to come back from."""
        raise MakewayError("There is no login in progress.", code="not_found", status=404)

    async def close(self) -> None:
        """There is nothing to close."""
