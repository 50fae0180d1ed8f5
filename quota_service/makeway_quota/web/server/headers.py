"""Set the headers of every response: a strict Content Security Policy, and whether it may be cached."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..settings import WebSettings


def content_security_policy(hub_origin: str = "") -> str:
    """Return the policy: nothing from other origins, nothing inline; `data:` images are Bootstrap's own icons.

    A Hub of another origin is allowed for its logo, and for forms, which it redirects to its login page once a login
    has expired.
    """
    hub = f" {hub_origin}" if hub_origin else ""
    return (
        f"default-src 'self'; img-src 'self' data:{hub}; object-src 'none'; base-uri 'none'; "
        f"form-action 'self'{hub}; frame-ancestors 'none'"
    )


SECURITY_HEADERS = (
    (b"content-security-policy", content_security_policy().encode()),
    (
        b"cross-origin-opener-policy",
        b"same-origin",
    ),  # a page of another origin that opens one in a window cannot reach it
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
)

SCOPE_KEY = "makeway.headers"
"""The key of a request's scope under which the headers of its response are"""


class HeadersMiddleware:
    """ASGI middleware: adds the headers to each response, also to streams and errors."""

    def __init__(self, app: ASGIApp, settings: WebSettings) -> None:
        self.app = app
        self.static = f"{settings.prefix}static/"
        self.security_headers = [
            (b"content-security-policy", content_security_policy(settings.hub_origin).encode()),
            *SECURITY_HEADERS[1:],
        ]
        self.live_offers = f"{settings.api}/offers/live"
        self.hub_origin = settings.hub_origin.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        added = list(self.security_headers)
        if self.hub_origin and scope["path"] == self.live_offers:  # by a ticket, without cookies
            added.append((b"access-control-allow-origin", self.hub_origin))
        if not scope["path"].startswith(self.static):
            added.append((b"cache-control", b"no-store"))
        scope[SCOPE_KEY] = added

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                add_headers(scope, message["headers"])
            await send(message)

        await self.app(scope, receive, send_with_headers)


def add_headers(scope: Scope, headers: list[tuple[bytes, bytes]]) -> None:
    """Add the headers of a request's response to those that it has.

    Starlette answers an unexpected error outside of all middleware: that answer gets them here.
    """
    present = {name.lower() for name, _ in headers}
    headers += [pair for pair in scope.get(SCOPE_KEY, ()) if pair[0] not in present]
