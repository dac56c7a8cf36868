"""One address of the app: a method, a path, and a handler that names the pieces of the address it wants."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

Handler = Callable[..., Awaitable[Any]]


class Address(Route):
    """A route that answers just the one method. `handler` takes `request` and the path's parameters, as far as it
    names them, and returns a `Response` or the object of a JSON answer; its docstring describes it."""

    def __init__(self, method: str, path: str, handler: Handler) -> None:
        super().__init__(path, _endpoint(handler), methods=[method])
        self.methods = {method}  # without the HEAD that Starlette adds: a dump would be written for nobody
        self.description = inspect.getdoc(handler) or ""


def add(app: Starlette, method: str, path: str, handler: Handler) -> None:
    app.router.routes.append(Address(method, path, handler))


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
