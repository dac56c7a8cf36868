"""Checks Host and Origin of a request: protection against DNS rebinding and other sites' pages.

A page of another site can send requests to loopback addresses. But it cannot forge Host, Origin and the Sec-Fetch
headers, or send JSON without a preflight.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Collection, Mapping

from ..domain.limits import host_and_port, origin
from ..errors import InvalidRequest

Headers = Mapping[str, str]
EVERY_ADDRESS = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - compared, not bound
# Values of Sec-Fetch-Site for our own pages, and for an address typed by a person.
OWN_SITES = frozenset({"same-origin", "none"})
# Paths that other sites may link to: the page, which has no data by itself.
PAGES = frozenset({"/", "/ui", "/ui/"})
# The longest list of header names in a preflight; no browser sends longer ones.
_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?: *, *[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_MOST_NAMES = 2048

METHODS = "GET, POST, DELETE"
# Headers that a page may read.
EXPOSED = (
    "X-Agent-Id, X-Turn-Id, X-Session-Id, X-Continuity, X-Continuity-Note, X-Request-Id, X-Backend, X-Model, "
    "X-Ignored-Params, X-Estimated, X-Should-Retry, Retry-After"
)
PREFLIGHT_SECONDS = "600"


class Origins:
    """`host`: the name or address that the proxy listens on; `allowed`: exact origins of other pages.

    `locked`: every request needs a key. If it listens on all addresses, its names are unknown, and with `locked` any
    name is accepted: a foreign page has no key.
    """

    def __init__(self, host: str, allowed: Collection[str], *, locked: bool) -> None:
        self._host = host.lower().strip("[]")
        self._allowed = {found: text for text in allowed if (found := origin(text)) is not None}
        self._any_name = locked and self._host in EVERY_ADDRESS

    def check_host(self, headers: Headers) -> None:
        """Raises `InvalidRequest` if the Host header has a name that is not ours."""
        named = host_and_port(headers.get("host", ""))
        # Only the name is compared: tunnels change the port, and a rebinding attack needs a name.
        ours = named is not None and (self._any_name or named[0] in ("localhost", self._host))
        if named is not None and not ours:
            with contextlib.suppress(ValueError):  # a name
                ours = ipaddress.ip_address(named[0]).is_loopback
        if not ours:
            raise InvalidRequest(
                "the Host header names another machine: call http://127.0.0.1 or http://localhost", param="Host"
            )

    def check_page(self, headers: Headers, scheme: str, page: str) -> str | None:
        """The allowed origin that sent the request; None for our own page and for programs.

        `page`: the requested path; the Host was checked. Raises `InvalidRequest` for other pages.
        """
        sent_origin = headers.get("origin")
        if sent_origin is not None:
            parsed = origin(sent_origin)
            if parsed in self._allowed:
                return self._allowed[parsed]
            if parsed is None or parsed != origin(f"{scheme}://{headers['host']}"):
                raise InvalidRequest(
                    "requests from pages of other origins are not served: name this one in allowed_origins, exactly, "
                    "if you trust it",
                    param="Origin",
                )
        elif headers.get("sec-fetch-site", "none") not in OWN_SITES:
            visit = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
            if page not in PAGES or visit != ("navigate", "document"):
                raise InvalidRequest(
                    "a page of another site sent this request: open the address yourself, or name that page's origin "
                    "in allowed_origins and fetch it as CORS",
                    param="Origin",
                )
        return None


def check_body(headers: Headers) -> None:
    """Refuse a page's forms: any page can send forms, but not JSON without permission. Raises `InvalidRequest`.

    Programs are not checked: `curl -d` sends every body as a form.
    """
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise InvalidRequest(
            "a body from a page must be JSON: send Content-Type: application/json", param="Content-Type"
        )


def readable_by(allowed: str) -> dict[str, str]:
    """The headers by which a browser lets this origin read an answer."""
    return {"Access-Control-Allow-Origin": allowed, "Vary": "Origin", "Access-Control-Expose-Headers": EXPOSED}


def permitted(allowed: str, headers: Headers) -> dict[str, str]:
    """The headers of the answer to a preflight of this origin."""
    added = {
        "Access-Control-Allow-Origin": allowed, "Vary": "Origin", "Access-Control-Allow-Methods": METHODS,
        "Access-Control-Max-Age": PREFLIGHT_SECONDS,
    }  # fmt: skip
    names = headers.get("access-control-request-headers", "")
    if len(names) <= _MOST_NAMES and _NAMES.fullmatch(names):
        added["Access-Control-Allow-Headers"] = names
    if headers.get("access-control-request-private-network") == "true":
        added["Access-Control-Allow-Private-Network"] = "true"
    return added
