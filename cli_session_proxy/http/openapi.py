"""`GET /openapi.json`: what the proxy answers, as OpenAPI 3.1. Made of the app's own routes, so that none is missing.

A body's schema names the fields that are read. Others are taken too and have no effect; answers are the vendors'
own objects, whose schemas are theirs to publish.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute

from ..domain.models import JSON
from ..export import FORMATS
from ..wires.failures import Wire, wire_of
from .addresses import Address, add
from .gate import OPEN, OPEN_BELOW
from .openapi_bodies import BODIES

EVENTS = "text/event-stream"
STREAMED = ("application/json", EVENTS)
FILES = ("text/html", "text/css", "text/javascript")

TEXT: JSON = {"type": "string"}
COUNT: JSON = {"type": "integer", "minimum": 1}
FLAG: JSON = {"enum": ["true", "false"]}
SWITCH: JSON = {"enum": ["1", "0"]}

# The last segment of a Google address says what is done with the model.
MODEL_METHODS = ("generateContent", "streamGenerateContent", "countTokens")
# What makes a turn: its address may begin with an agent, and its headers may name one.
TURNS = re.compile(r"/v1/(chat/completions|messages|responses)|/v1(beta)?/interactions|.*enerateContent")

HEADERS: Mapping[str, JSON] = {
    "X-Agent-Id": {
        **TEXT,
        "pattern": "^([A-Za-z0-9._~-]|%[0-7][0-9A-F])+$",
        "description": "the agent's name, percent-encoded UTF-8",
    },
    "X-Chain": {"const": "new", "description": "begin the named agent afresh"},
    "Idempotency-Key": {**TEXT, "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
}
_PAGE: Mapping[str, JSON] = {"limit": COUNT, "after": TEXT, "order": {"enum": ["asc", "desc"]}}
QUERIES: Mapping[str, Mapping[str, JSON]] = {
    "/v1/chains": {"search": TEXT, "limit": COUNT},
    "/v1/chains/{agent_id}": {"format": {"enum": list(FORMATS)}, "redact": SWITCH},
    "/v1/chains/{agent_id}/turns": {"before": COUNT, "limit": COUNT},
    "/v1/chains/{agent_id}/turns/{turn_id}": {"redact": SWITCH},
    "/v1/responses/{response_id}": {"stream": FLAG, "starting_after": {"type": "integer", "minimum": 0}},
    "/v1/responses/{response_id}/input_items": _PAGE,
    "/v1/conversations/{conversation_id}/items": _PAGE,
    "/v1/interactions/{name}": {"stream": FLAG, "last_event_id": TEXT, "include_input": FLAG},
    "/v1/models/{model}:streamGenerateContent": {"alt": {"const": "sse"}},
}
# Where an answer is not (only) JSON.
MEDIA: Mapping[str, tuple[str, ...]] = {
    "/v1/chat/completions": STREAMED,
    "/v1/messages": STREAMED,
    "/v1/responses": STREAMED,
    "/v1/responses/{response_id}": STREAMED,
    "/v1/interactions": STREAMED,
    "/v1/interactions/{name}": STREAMED,
    "/v1/models/{model}:streamGenerateContent": (EVENTS,),
    "/v1/chains/{agent_id}": tuple(dict.fromkeys(one.media_type.partition(";")[0] for one in FORMATS.values())),
    "/v1/chains/{agent_id}/events": (EVENTS,),
    "/metrics": ("text/plain",),
    "/ui": ("text/html",),
    "/ui/": ("text/html",),
    "/ui/{name}": FILES,
}

ERRORS: Mapping[Wire, JSON] = {
    "openai": {
        "message": TEXT, "type": TEXT, "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]},
    },
    "anthropic": {"type": TEXT, "message": TEXT, "details": {"type": "object"}},
    "google": {"code": {"type": "integer"}, "message": TEXT, "status": TEXT, "details": {"type": "array"}},
    "interactions": {"code": TEXT, "message": TEXT},
}  # fmt: skip


class OpenApiRoute:
    """The description of the app that it is added to."""

    def __init__(self) -> None:
        self._routes: list[BaseRoute] = []

    def add_to(self, app: Starlette) -> None:
        self._routes = app.routes
        add(app, "GET", "/openapi.json", self.openapi)

    async def openapi(self) -> JSONResponse:
        return JSONResponse(document(self._routes))


def document(routes: Iterable[BaseRoute]) -> JSON:
    paths: dict[str, JSON] = {}
    for route in routes:
        if isinstance(route, Address):
            for path in _paths(route):
                for method in sorted(route.methods or ()):
                    paths.setdefault(path, {})[method.lower()] = _operation(route, path, method)
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
            "schemas": {_error_name(wire): _error(wire, inner) for wire, inner in ERRORS.items()},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                **{name: {"type": "apiKey", "in": "header", "name": name} for name in ("x-api-key", "x-goog-api-key")},
                "key": {"type": "apiKey", "in": "query", "name": "key"},
            },
        },
    }


def _paths(route: Address) -> list[str]:
    path = re.sub(r"\{(\w+):path\}", r"{\1}", route.path)
    if path.endswith("/models/{target}"):
        return [path.replace("{target}", f"{{model}}:{method}") for method in MODEL_METHODS]
    return [path]


def _operation(route: Address, path: str, method: str) -> JSON:
    known = path.replace("/v1beta/", "/v1/")
    summary = route.description.partition("\n")[0]
    operation: JSON = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").rstrip("_"),
        "parameters": _parameters(path, known, method),
        "responses": _responses(path, known, method),
    }
    if summary:
        operation["summary"] = summary
    if method == "POST" and known in BODIES:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": BODIES[known]}}}
    if path in OPEN or path.startswith(OPEN_BELOW):
        operation["security"] = []
    return operation


def _parameters(path: str, known: str, method: str) -> list[JSON]:
    found = [_parameter("path", name, TEXT) for name in re.findall(r"\{(\w+)\}", path)]
    if method == "GET" or known.endswith(":streamGenerateContent"):
        found += [_parameter("query", name, schema) for name, schema in QUERIES.get(known, {}).items()]
    if method == "POST" and TURNS.fullmatch(path):
        found += [_parameter("header", name, schema) for name, schema in HEADERS.items()]
    return found


def _parameter(place: str, name: str, schema: JSON) -> JSON:
    return {"in": place, "name": name, "required": place == "path" or name == "alt", "schema": schema}


def _responses(path: str, known: str, method: str) -> JSON:
    # DELETE of the same address answers in JSON; the others have one method that does not.
    media = ("application/json",) if method == "DELETE" else MEDIA.get(known, ("application/json",))
    wires: tuple[Wire, ...] = (wire_of(path, {}),)
    if method == "GET" and path.startswith("/v1/models"):
        wires = ("openai", "anthropic", "google")  # told apart by what their clients send
    errors = {"anyOf": [{"$ref": f"#/components/schemas/{_error_name(wire)}"} for wire in wires]}
    responses: JSON = {
        "200": {"description": "done", "content": {one: _shape(one) for one in media}},
        "default": {"description": "an error", "content": {"application/json": {"schema": errors}}},
    }
    if path == "/":
        responses["303"] = {"description": "a browser is led to the page"}
    if path == "/readyz":
        responses["503"] = {
            "description": "it drains, or its store cannot be used",
            "content": {"application/json": _shape("application/json")},
        }
    return responses


def _shape(media: str) -> JSON:
    return {"schema": {"type": "object"}} if media == "application/json" else {}


def _error_name(wire: Wire) -> str:
    return f"{wire.capitalize()}Error"


def _error(wire: Wire, inner: JSON) -> JSON:
    outer: JSON = {"error": {"type": "object", "properties": inner, "required": list(inner)}}
    if wire == "anthropic":
        outer |= {"type": {"const": "error"}, "request_id": TEXT}
    return {"type": "object", "properties": outer, "required": list(outer)}
