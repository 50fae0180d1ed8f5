"""Set the headers of every response: a strict Content Security Policy, and whether it may be cached."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..settings import WebSettings


def content_policy(hub_origin: str = "") -> str:
    """Return the policy: nothing from outside, nothing inline; `data:` images are Bootstrap's own icons.

    From a Hub of another origin comes its logo, and there a form leads whose login has ended.
    """
    hub = f" {hub_origin}" if hub_origin else ""
    return (
        f"default-src 'self'; img-src 'self' data:{hub}; object-src 'none'; base-uri 'none'; "
        f"form-action 'self'{hub}; frame-ancestors 'none'"
    )


ALWAYS = (
    (b"content-security-policy", content_policy().encode()),
    (b"cross-origin-opener-policy", b"same-origin"),  # a page that opens one in a window gets no hold of it
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
)

SCOPE_KEY = "makeway.headers"
"""The key of a request's scope with what its response gets"""


class Headers:
    """ASGI middleware: adds the headers to each response, also to streams and errors."""

    def __init__(self, app: ASGIApp, settings: WebSettings) -> None:
        self.app = app
        self.static = f"{settings.prefix}static/"
        self.always = [(b"content-security-policy", content_policy(settings.hub_origin).encode()), *ALWAYS[1:]]
        self.live_offers = f"{settings.api}/offers/live"
        self.hub_origin = settings.hub_origin.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        extra = list(self.always)
        if self.hub_origin and scope["path"] == self.live_offers:  # by a ticket, without cookies
            extra.append((b"access-control-allow-origin", self.hub_origin))
        if not scope["path"].startswith(self.static):
            extra.append((b"cache-control", b"no-store"))
        scope[SCOPE_KEY] = extra

        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                add_headers(scope, message["headers"])
            await send(message)

        await self.app(scope, receive, add)


def add_headers(scope: Scope, headers: list[tuple[bytes, bytes]]) -> None:
    """Add the headers of a request's response to those that it has.

    Starlette answers an unexpected error outside of all middleware: that answer gets them here.
    """
    present = {name.lower() for name, _ in headers}
    headers += [pair for pair in scope.get(SCOPE_KEY, ()) if pair[0] not in present]
