"""Set the headers of every response: a strict Content Security Policy, and whether it may be cached."""

from __future__ import annotations

from .limits import App, Message, Receive, Scope, Send
from .settings import WebSettings


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


class Headers:
    """ASGI middleware: adds the headers to each response, also to streams and errors."""

    def __init__(self, app: App, settings: WebSettings) -> None:
        self.app = app
        self.static = f"{settings.prefix}static/"
        self.always = [(b"content-security-policy", content_policy(settings.hub_origin).encode()), *ALWAYS[1:]]
        self.live_offers = f"{settings.api}/offers/live"
        self.hub_origin = settings.hub_origin.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                extra = list(self.always)
                if self.hub_origin and scope["path"] == self.live_offers:  # by a ticket, without cookies
                    extra.append((b"access-control-allow-origin", self.hub_origin))
                if not scope["path"].startswith(self.static):
                    extra.append((b"cache-control", b"no-store"))
                message["headers"] = [*message["headers"], *(pair for pair in extra if pair[0] not in present)]
            await send(message)

        await self.app(scope, receive, add)
