"""One address of the app: a method, a path, and a handler that names the pieces of the address it wants."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from ..domain.models import JSON

Handler = Callable[..., Awaitable[Any]]

EVENT_STREAM = "text/event-stream"
STREAMED = ("application/json", EVENT_STREAM)


@dataclass(frozen=True, slots=True)
class About:
    """What `/openapi.json` says of an address: the schema of its body and of its query, the media of its answers.

    `turn`: it makes a turn, so an agent may be named in its headers.
    """

    body: JSON | None = None
    query: Mapping[str, JSON] = field(default_factory=dict)
    media: tuple[str, ...] = ("application/json",)
    turn: bool = False


class Address(Route):
    """A route that answers just the one method. `handler` takes `request` and the path's parameters, as far as it
    names them, and returns a `Response` or the object of a JSON answer; its docstring describes it.

    `shown` are the addresses that stand for a path with a form of its own, such as `{model}:{method}`."""

    def __init__(self, method: str, path: str, handler: Handler, shown: Mapping[str, About]) -> None:
        super().__init__(path, _endpoint(handler), methods=[method])
        self.methods = {method}  # without the HEAD that Starlette adds: a dump would be written for nobody
        self.description = inspect.getdoc(handler) or ""
        self.shown = shown


class Exact(BaseRoute):
    """The addresses without parameters, found by one look; it stands before all routes, which are tried in turn."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Address] = {}

    def take(self, address: Address) -> None:
        for method in address.methods or ():
            self._found.setdefault((method, address.path), address)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        found = self._found.get((scope.get("method", ""), scope["path"]))
        return (Match.NONE, {}) if found is None else (Match.FULL, {"address": found, "path_params": {}})

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await scope["address"].handle(scope, receive, send)


def add(
    app: Starlette,
    method: str,
    path: str,
    handler: Handler,
    about: About | None = None,
    shown: Mapping[str, About] | None = None,
) -> None:
    routes = app.router.routes
    if not routes:
        routes.append(Exact())
    plain = re.sub(r"\{(\w+):path\}", r"{\1}", path)
    address = Address(method, path, handler, shown or {plain: about or About()})
    routes.append(address)
    if "{" not in path:
        assert isinstance(routes[0], Exact), "all routes are made here"
        routes[0].take(address)


def methods_of(app: Starlette, scope: Scope) -> set[str]:
    """All methods that the address takes. Starlette's own 405 names those of the first route with it."""
    there = (route for route in app.routes if isinstance(route, Address) and route.matches(scope)[0] is not Match.NONE)
    return {method for route in there for method in route.methods or ()}


def _endpoint(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    names = tuple(inspect.signature(handler).parameters)

    async def endpoint(request: Request) -> Response:
        given = {**request.path_params, "request": request}
        answer = await handler(**{name: given[name] for name in names})
        return answer if isinstance(answer, Response) else JSONResponse(answer)

    return endpoint
