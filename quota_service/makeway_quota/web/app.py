"""Construct the web part: one FastAPI app for the API, the event stream, the pages and the probes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI, Request

from ..services import Services
from . import api, assets, pages, probes
from .login.auth import Authenticator, Directory
from .openapi import describe
from .requests.compression import Compression
from .requests.hold_reads import HoldReads
from .requests.limits import CheckAgent, CheckToken, Limits
from .requests.route_table import DirectRoutes, RouteTable
from .server import problems
from .server.headers import HeadersMiddleware
from .settings import WebSettings
from .stream import Streams


def create_app(services: Services, settings: WebSettings, directory: Directory | None = None) -> FastAPI:
    """Return the app; users and tokens come from the Hub unless another directory is given (tests, benchmarks).

    Call `app.state.streams.close()` as soon as the server begins to stop: it ends streams and long polls.
    """
    if directory is None:
        from .login.hub_login import HubDirectory

        directory = HubDirectory(settings, people=services.context.world.people)
    app = FastAPI(
        title="Makeway",
        description="Quotas, guaranteed sessions and training jobs that make way.",
        version="1",
        docs_url=None,
        redoc_url=None,
        openapi_url=f"{settings.api}/openapi.json",
        lifespan=_lifespan(directory),
        redirect_slashes=False,
        swagger_ui_oauth2_redirect_url=None,
    )
    app.openapi = describe(app)  # type: ignore[method-assign]
    app.state.services = services
    app.state.settings = settings
    app.state.streams = Streams(settings)
    app.state.authenticator = Authenticator(settings, directory)
    app.include_router(api.router(), prefix=settings.api)
    app.include_router(probes.router(settings))
    pages.install(app, settings)
    assets.mount(app, settings)
    table = _route_table(settings)
    app.router.routes.insert(0, table)
    problems.install(app, _is_page(settings), pages.error_page)
    app.add_middleware(DirectRoutes, table=table)
    app.add_middleware(
        Limits,
        settings=settings,
        authenticator=app.state.authenticator,
        check_token=_token_check(services),
        check_agent=_agent_check(services),
    )
    app.add_middleware(Compression, static=f"{settings.prefix}static/")
    app.add_middleware(HeadersMiddleware, settings=settings)
    app.add_middleware(HoldReads, settings=settings, services=services)
    return app


def _lifespan(directory: Directory) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            app.state.streams.close()
            await directory.close()

    return lifespan


def _token_check(services: Services) -> CheckToken:
    def check(token: str, worker: tuple[str, int, int]) -> None:
        services.attempts.check_token(token, worker, renewing=True)

    return check


def _agent_check(services: Services) -> CheckAgent:
    def check(token: str, machine: str) -> str:
        if not machine:
            return services.agents.check_join_token(token)
        services.agents.check_token(token, machine, renewing=True)
        return machine

    return check


def _route_table(settings: WebSettings) -> RouteTable:
    table = RouteTable()
    table.add(settings.api, api.ROUTERS)
    table.add(settings.prefix.rstrip("/"), pages.ROUTERS)
    return table


def _is_page(settings: WebSettings) -> Callable[[Request], bool]:
    def is_page(request: Request) -> bool:
        path = request.url.path
        if not path.startswith(settings.prefix) or path.startswith((f"{settings.api}/", f"{settings.prefix}static/")):
            return False
        return "text/html" in request.headers.get("accept", "")

    return is_page
