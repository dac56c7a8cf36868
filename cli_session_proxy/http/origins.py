"""Who may ask: by the name that a request calls us, and by the page that a browser sends it for.

A page of another site can send requests to loopback addresses. What it cannot do is to lie in Host, Origin and the
Sec-Fetch headers, or to send JSON without asking first (a preflight).
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Collection, Mapping

from ..domain.identifiers import host_and_port, origin
from ..errors import InvalidRequest

Headers = Mapping[str, str]
EVERY_ADDRESS = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - compared, not bound
# Sites by which a browser names our own pages, or a person who typed the address.
OWN_SITES = frozenset({"same-origin", "none"})
# Where a link of another site may lead a person: the page, which shows nothing by itself.
PAGES = frozenset({"/", "/ui", "/ui/"})
# Header names that a preflight asks for; no browser sends longer lists.
_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?: *, *[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_MOST_NAMES = 2048

METHODS = "GET, POST, DELETE"
# What a page may read of an answer, beside its body.
EXPOSED = (
    "X-Agent-Id, X-Turn-Id, X-Session-Id, X-Continuity, X-Continuity-Note, X-Request-Id, X-Backend, X-Model, "
    "X-Ignored-Params, X-Estimated, X-Should-Retry, Retry-After"
)
PREFLIGHT_SECONDS = "600"


class Origins:
    """`host` is the name or address that the proxy listens on; `allowed` are other pages' origins, exactly.

    `locked`: every request needs a key. Where the machine listens on all its addresses we do not know its names, and
    any name will do then: a foreign page has no key.
    """

    def __init__(self, host: str, allowed: Collection[str], *, locked: bool) -> None:
        self._host = host.lower().strip("[]")
        self._allowed = {found: text for text in allowed if (found := origin(text)) is not None}
        self._any_name = locked and self._host in EVERY_ADDRESS

    def check_host(self, headers: Headers) -> None:
        """Raises `InvalidRequest` where we were called by a name that is not ours."""
        named = host_and_port(headers.get("host", ""))
        # Only the name is compared: tunnels and port maps change the port, a rebinding attack has to bring a name.
        ours = named is not None and (self._any_name or named[0] in ("localhost", self._host))
        if named is not None and not ours:
            with contextlib.suppress(ValueError):  # a name
                ours = ipaddress.ip_address(named[0]).is_loopback
        if not ours:
            raise InvalidRequest(
                "the Host header names another machine: call http://127.0.0.1 or http://localhost", param="Host"
            )

    def check_page(self, headers: Headers, scheme: str, page: str) -> str | None:
        """The origin that may read the answer, where an allowed one asks; None for our own page and for programs.

        `page` is the path that is asked for, at a Host that was checked. Raises `InvalidRequest` for every other page.
        """
        given = headers.get("origin")
        if given is not None:
            named = origin(given)
            if named in self._allowed:
                return self._allowed[named]
            if named is None or named != origin(f"{scheme}://{headers['host']}"):
                raise InvalidRequest(
                    "requests from pages of other origins are not served: name this one in allowed_origins, exactly, "
                    "if you trust it",
                    param="Origin",
                )
        elif headers.get("sec-fetch-site", "none") not in OWN_SITES:
            visit = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
            if page not in PAGES or visit != ("navigate", "document"):
                raise InvalidRequest(
                    "a page of another site asks for this: open the address yourself, or name that page's origin in "
                    "allowed_origins and fetch it as CORS",
                    param="Origin",
                )
        return None


def check_body(headers: Headers) -> None:
    """Refuse a page's forms: any page can send those, but not JSON without permission. Raises `InvalidRequest`.

    Not asked of programs: `curl -d` calls everything a form.
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
    said = {
        "Access-Control-Allow-Origin": allowed, "Vary": "Origin", "Access-Control-Allow-Methods": METHODS,
        "Access-Control-Max-Age": PREFLIGHT_SECONDS,
    }  # fmt: skip
    names = headers.get("access-control-request-headers", "")
    if len(names) <= _MOST_NAMES and _NAMES.fullmatch(names):
        said["Access-Control-Allow-Headers"] = names
    if headers.get("access-control-request-private-network") == "true":
        said["Access-Control-Allow-Private-Network"] = "true"
    return said
