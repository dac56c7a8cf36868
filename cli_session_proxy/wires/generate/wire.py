"""Google's generateContent."""

from __future__ import annotations

import re

from ..base import Asked, Claim, Models, Wire
from . import body as generate
from .errors import GOOGLE
from .routes import GenerateRoutes


def _is_googles(asked: Asked) -> bool:
    return "x-goog-api-key" in asked.headers or re.search(r"(^|&)key=", asked.query) is not None


WIRE = Wire(
    name=generate.WIRE,
    claims=(
        Claim("/v1beta"),
        Claim("/v1/models", form=re.compile(r"/v1/models/.*:\w+", re.S)),
        Claim("/v1/models", by=_is_googles),
    ),
    errors=GOOGLE,
    routes=GenerateRoutes,
    models=Models(generate.model_info, generate.model_list),
    bases=("/v1/", "/v1beta/"),
    key_in_address=True,
)
