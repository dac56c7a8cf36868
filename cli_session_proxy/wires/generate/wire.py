"""Google's generateContent."""

from __future__ import annotations

import re

from ..base import AddressClaim, Models, RequestAddress, Wire
from . import body as generate
from .errors import GOOGLE
from .routes import GenerateRoutes


def _is_googles(asked: RequestAddress) -> bool:
    return "x-goog-api-key" in asked.headers or re.search(r"(^|&)key=", asked.query) is not None


# What follows a model's name in Google's addresses; other vendors' names have colons too (`llama3:8b`, `…-v1:0`).
_METHOD = re.compile(r"/v1/models/.*:(?:\w+(?:Contents?|Tokens|Answer)|predict\w*)", re.S)

WIRE = Wire(
    name=generate.WIRE,
    claims=(
        AddressClaim("/v1beta"),
        AddressClaim("/v1/models", form=_METHOD),
        AddressClaim("/v1/models", by=_is_googles),
    ),
    errors=GOOGLE,
    routes=GenerateRoutes,
    models=Models(generate.model_info, generate.model_list),
    bases=("/v1/", "/v1beta/"),
    key_in_address=True,
)
