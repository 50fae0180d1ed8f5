"""Authenticate requests: by a Hub token in a header, or by the cookie of a login through the Hub."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from fastapi import Request, Response
from fastapi.responses import RedirectResponse
from makeway_api.errors import MakewayError

from ...services import Caller
from ...services.caller import SCOPE
from ..server.connections import SpawnerTokens, note_login
from ..settings import WebSettings
from .tickets import Signer, masked, same, unmasked

COOKIE = "makeway-login"
COOKIE_SECONDS = 14 * 86_400
__all__ = ["SCOPE", "Authenticator", "Directory", "TokenAuth", "Visitor", "may", "may_for_some", "needs", "refusal"]
_HEADER = re.compile(r"(?:token|bearer)\s+(\S+)\s*", re.IGNORECASE)
_READS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class Visitor:
    """A caller and how it was authenticated; `xsrf` is what its pages must send back."""

    caller: Caller
    by_cookie: bool = False
    xsrf: str = ""


class Directory(Protocol):
    """Tokens and groups: the Hub in production, a fixed table in tests and benchmarks."""

    async def caller_of(self, token: str, session_id: str) -> Caller | None:
        """Return the holder of a token, or None; MakewayError 503 while the Hub cannot be reached."""

    async def groups_of(self, user: str) -> Sequence[str]:
        """Return the groups that a user is in now."""

    async def login(self, request: Request, authenticator: Authenticator) -> Response:
        """Redirect a browser without a cookie to the login."""

    async def logged_in(self, request: Request, authenticator: Authenticator) -> Response:
        """Finish a login: set the cookie and redirect to the page."""

    async def close(self) -> None:
        """Close the connections."""


class Authenticator:
    """Reads the visitor of a request, refuses forged requests, and issues the login cookie."""

    def __init__(self, settings: WebSettings, directory: Directory) -> None:
        self.settings = settings
        self.directory = directory
        self.signer = Signer(settings.secret)
        self.spawner_tokens = SpawnerTokens()

    async def visitor(self, request: Request) -> Visitor | None:
        """Return the caller of a request; None without a login. A wrong token is 401, a forged cookie request 403."""
        caller = await self.caller(request)
        if caller is None:
            return None
        note_login(request.scope)
        if "authorization" in request.headers:
            return Visitor(caller)
        session_id, token = _session_id(request), self._cookie(request)
        xsrf = self.signer.digest("xsrf", f"{session_id}:{hashlib.sha256(token.encode()).hexdigest()}")
        await self._check_forgery(request, xsrf)
        return Visitor(caller, by_cookie=True, xsrf=masked(xsrf))

    async def caller(self, request: Request) -> Caller | None:
        """Return the caller by headers and cookies alone; None without a login, 401 for a wrong token.

        The body is not read, and a forged request is not noticed: see `visitor`.
        """
        header = request.headers.get("authorization")
        if header is not None:
            match = _HEADER.fullmatch(header)
            caller = await self.directory.caller_of(match.group(1), _session_id(request)) if match else None
            if match and caller and caller.holds("reserve"):
                self.spawner_tokens.add(match.group(1))
            if caller is None:
                raise MakewayError(
                    "The token in the Authorization header is not valid (any more). "
                    "Make a new one on the Hub's token page and send it as `Authorization: token …`.",
                    code="unauthorized",
                    status=401,
                )
            return caller
        token = self._cookie(request)
        return await self.directory.caller_of(token, _session_id(request)) if token else None

    def _cookie(self, request: Request) -> str:
        """Return the token in the login cookie, or an empty string."""
        name, _ = self.cookie_name(COOKIE, request)
        token = self.signer.read("cookie", request.cookies.get(name, ""))
        return token if isinstance(token, str) else ""

    def admit(self, response: Response, request: Request, token: str) -> None:
        """Set the login cookie."""
        name, path = self.cookie_name(COOKIE, request)
        response.set_cookie(
            name,
            self.signer.sign("cookie", token, COOKIE_SECONDS),
            max_age=COOKIE_SECONDS,
            path=path,
            httponly=True,
            samesite="lax",
            secure=is_https(request),
        )

    def cookie_name(self, name: str, request: Request) -> tuple[str, str]:
        """Return the name and the path of a cookie.

        Where users' servers have names below the same host, they could set a cookie for the service, too. Browsers let
        them set none with the prefix __Host-, which needs TLS and the path /.
        """
        if self.settings.hub_origin and is_https(request):
            return f"__Host-{name}", "/"
        return name, self.settings.prefix

    async def _check_forgery(self, request: Request, xsrf: str) -> None:
        """Refuse a request by cookie that no page of the service sent; notebooks may share origin and cookies."""
        if request.method not in _READS and not _from_own_page(request):
            raise MakewayError(
                "This change was sent by a page of another address than the panel's. Open the panel itself and try "
                "again; programs use an API token instead.",
                code="other_origin",
                status=403,
            )
        mode = request.headers.get("sec-fetch-mode", "unspecified")
        if request.method in _READS and not self._is_api(request) and mode in ("navigate", "unspecified"):
            return
        sent = request.headers.get("x-xsrftoken") or request.query_params.get("_xsrf") or ""
        if not sent and _is_form(request):
            sent = str((await request.form()).get("_xsrf", ""))
        if not same(xsrf, unmasked(sent)):
            raise MakewayError(
                "This request came with a login cookie but without the page's own token (_xsrf). "
                "Reload the page and try again; programs use an API token instead.",
                code="xsrf",
                status=403,
            )

    def _is_api(self, request: Request) -> bool:
        return request.url.path.startswith(f"{self.settings.api}/")


def may(caller: Caller, *scopes: str) -> bool:
    """Whether the caller has one of the scopes for everything that it covers; admin stands for all but `reserve`.

    A scope with a `!group=` filter does not count: see `may_for_some`.
    """
    if caller.admin and any(scope != "reserve" for scope in scopes):
        return True
    return any(caller.holds(scope) for scope in scopes)


def may_for_some(caller: Caller, *scopes: str) -> bool:
    """Whether the caller has one of the scopes, be it for the teams of some groups only: the service must filter."""
    return may(caller, *scopes) or any(caller.groups_with(scope) for scope in scopes)


def needs(*scopes: str, some: Sequence[str] = (), by_token: bool = False) -> Callable[[Request], Awaitable[Caller]]:
    """Make the dependency of a route: the caller, who holds one of `scopes`, or one of `some` for some groups.

    `by_token`: the cookie of a login is not enough, for what a page has to show and confirm first.
    """

    async def caller(request: Request) -> Caller:
        authenticator: Authenticator = request.app.state.authenticator
        visitor = await authenticator.visitor(request)
        if visitor is None:
            raise login_first()
        if not may(visitor.caller, *scopes, *some) and not may_for_some(visitor.caller, *some):
            raise refusal(visitor.caller, (*scopes, *some))
        if by_token and visitor.by_cookie:
            raise MakewayError(
                "What concerns all people is changed in the panel, which shows first what the change does and has it "
                "confirmed. Programs send a token of the Hub: `Authorization: token …`.",
                code="confirmation",
                status=403,
            )
        return visitor.caller

    return caller


async def still_reads(authenticator: Authenticator, request: Request) -> Caller | None:
    """Return the caller of a long-lived request with its present rights; None once it may no longer read.

    While the Hub cannot be reached, the answer is None too: the reader comes back when it can be asked again.
    """
    try:
        caller = await authenticator.caller(request)
    except MakewayError:
        return None
    return caller if caller is not None and may(caller, "read") else None


def login_first() -> MakewayError:
    """Make the error of a request without a login."""
    return MakewayError(
        "Log in first, or send a token of the Hub: `Authorization: token …`.", code="unauthorized", status=401
    )


def refusal(caller: Caller, scopes: Sequence[str]) -> MakewayError:
    """Make the error that names the missing scope and how to get it."""
    names = " or ".join(f"{SCOPE}{scope}" for scope in scopes)
    return MakewayError(
        f"{caller.name} may not do this: it needs the scope {names}. An administrator of the Hub grants it "
        "with a role; a token must list it too.",
        code="forbidden",
        status=403,
        numbers={"scopes": [f"{SCOPE}{scope}" for scope in scopes]},
    )


def is_https(request: Request) -> bool:
    """Whether the browser's own connection is encrypted; proxies tell by a header."""
    proto = request.headers.get("x-scheme") or request.headers.get("x-forwarded-proto") or request.url.scheme
    return proto.partition(",")[0].strip().lower() == "https"


def _from_own_page(request: Request) -> bool:
    """Whether a page of the same origin sent a request, by what the browser says; old ones and programs say nothing.

    Browsers leave `Sec-Fetch-Site` out where they speak http with another machine. Proxies may change `Host`.
    """
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = request.headers.get("origin")
    if origin is None:
        return True
    try:
        sender = urlsplit(origin).netloc.lower()
    except ValueError:
        return False
    hosts = (request.headers.get("host", ""), request.headers.get("x-forwarded-host", "").partition(",")[0].strip())
    return bool(sender) and sender in [host.lower() for host in hosts]


def _session_id(request: Request) -> str:
    return request.cookies.get("jupyterhub-session-id", "")


def _is_form(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return request.method == "POST" and kind in ("application/x-www-form-urlencoded", "multipart/form-data")


class TokenAuth:
    """A fixed table of tokens and groups, for tests and benchmarks that run the app in their own process.

    No setting of the service switches it on.
    """

    def __init__(self, tokens: Mapping[str, Caller], groups: Mapping[str, Sequence[str]] | None = None) -> None:
        self.tokens = dict(tokens)
        self.groups = dict(groups or {})

    async def caller_of(self, token: str, session_id: str) -> Caller | None:
        """Return the holder of a token."""
        return self.tokens.get(token)

    async def groups_of(self, user: str) -> Sequence[str]:
        """Return the groups of a user, by the table or by the callers."""
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
        """Refuse: there is no login in progress."""
        raise MakewayError("There is no login in progress.", code="not_found", status=404)

    async def close(self) -> None:
        """Close nothing."""
