"""`GET /openapi.json`: the proxy's API as OpenAPI 3.1, generated from the app's routes, so that none is missing.

A body's schema has the fields that are read. Other fields are accepted without effect. Answers are the vendors' own
objects, whose schemas they publish.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.routing import BaseRoute

from ..domain.models import JSON
from ..wires.asgi import Address, JSONAnswer, RouteDoc, Table, add
from ..wires.base import ErrorShape
from ..wires.schemas import TEXT
from .gate import NO_KEY_NEEDED, NO_KEY_NEEDED_BELOW

HEADERS: Mapping[str, JSON] = {
    "X-Agent-Id": {
        **TEXT,
        "pattern": "^([A-Za-z0-9._~-]|%[0-7][0-9A-F])+$",
        "description": "the agent's name, percent-encoded UTF-8",
    },
    "X-Chain": {
        "enum": ["new", "none"],
        "description": "begin the named agent afresh; keep nothing once it was answered",
    },
    "Idempotency-Key": {**TEXT, "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
}


def add_openapi(app: Starlette, wires: Table) -> None:
    """Serve the OpenAPI document of all routes of the app."""

    async def openapi() -> JSONAnswer:
        return JSONAnswer(document(app.routes, wires))

    add(app, "GET", "/openapi.json", openapi)


def document(routes: Iterable[BaseRoute], wires: Table) -> JSON:
    paths: dict[str, JSON] = {}
    for route in routes:
        if isinstance(route, Address):
            for path, about in route.documented.items():
                for method in sorted(route.methods or ()):
                    paths.setdefault(path, {})[method.lower()] = _operation(route, about, path, method, wires)
    shapes = {wire.errors.name: wire.errors for wire in wires.wires}
    return {
        "openapi": "3.1.0",
        "info": {"title": "cli_session_proxy", "version": version("cli-session-proxy")},
        "servers": [
            {"url": "/"},
            {"url": "/agents/{agent}", "description": "of one agent", "variables": {"agent": {"default": "main"}}},
        ],
        "security": [{"bearer": []}, {"x-api-key": []}, {"x-goog-api-key": []}, {"key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": {_error_name(shape): shape.schema for shape in shapes.values()},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                **{name: {"type": "apiKey", "in": "header", "name": name} for name in ("x-api-key", "x-goog-api-key")},
                "key": {"type": "apiKey", "in": "query", "name": "key"},
            },
        },
    }


def _operation(route: Address, about: RouteDoc, path: str, method: str, wires: Table) -> JSON:
    summary = route.description.partition("\n")[0]
    parameters = [_parameter("path", name, TEXT) for name in re.findall(r"\{(\w+)\}", path)]
    parameters += [_parameter("query", name, schema) for name, schema in about.query.items()]
    if about.turn:
        parameters += [_parameter("header", name, schema) for name, schema in HEADERS.items()]
    shapes = dict.fromkeys(_error_name(wire.errors) for wire in wires.all_of(path))
    errors = {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in shapes]}
    responses: JSON = {
        "200": {"description": "done", "content": {one: _shape(one) for one in about.media}},
        "default": {"description": "an error", "content": {"application/json": {"schema": errors}}},
    }
    if path == "/":
        responses["303"] = {"description": "a browser is led to the page"}
    if path == "/readyz":
        responses["503"] = {
            "description": "it drains, or its store cannot be used",
            "content": {"application/json": _shape("application/json")},
        }
    operation: JSON = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").rstrip("_"),
        "parameters": parameters,
        "responses": responses,
    }
    if summary:
        operation["summary"] = summary
    if about.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": about.body}}}
    if path in NO_KEY_NEEDED or path.startswith(NO_KEY_NEEDED_BELOW):
        operation["security"] = []
    return operation


def _parameter(place: str, name: str, schema: JSON) -> JSON:
    # A query parameter with a single possible value is required.
    return {
        "in": place,
        "name": name,
        "required": place == "path" or (place, *schema) == ("query", "const"),
        "schema": schema,
    }


def _shape(media: str) -> JSON:
    return {"schema": {"type": "object"}} if media == "application/json" else {}


def _error_name(shape: ErrorShape) -> str:
    return f"{shape.name.capitalize()}Error"
