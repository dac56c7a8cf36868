"""All errors for callers, as one tree of exceptions. `retry_after` is in seconds.

An error has data (status, code, param, retry_after, detail), and its text says what to do next. No error text has a
key, an environment or a prompt.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, ClassVar


class ProxyError(Exception):
    """The base of all errors. `status` is the HTTP status, `code` the stable name of the contract.

    `retry`: whether a client's own retry of the same request within a minute may succeed; `retries_help` is its default
    for a class.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    retries_help: ClassVar[bool] = True

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        detail: dict[str, Any] | None = None,
        retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.detail = detail or {}
        self.retry = self.retries_help if retry is None else retry

    def __init_subclass__(
        cls, *, status: int | None = None, code: str | None = None, retries_help: bool | None = None
    ) -> None:
        """The arguments of a class statement below; None: as the class above it."""
        for name, value in (("status", status), ("code", code), ("retries_help", retries_help)):
            if value is not None:
                setattr(cls, name, value)

    def as_dict(self) -> dict[str, Any]:
        """The form kept in the store and shown in a dump: `{status, code, message, …}`."""
        data: dict[str, Any] = {"status": self.status, "code": self.code, "message": self.message}
        if self.param is not None:
            data["param"] = self.param
        if self.retry_after is not None:
            data["retry_after"] = self.retry_after
        if self.detail:
            data["detail"] = self.detail
        if self.retry != self.retries_help:
            data["retry"] = self.retry
        return data


class InvalidRequest(ProxyError, status=400, code="invalid_request", retries_help=False):
    """The request is wrong; `param` names the field."""


class ContextTooLong(InvalidRequest, code="context_too_long"):
    """The conversation is longer than the model or the proxy can take."""


class PreviousNotFound(InvalidRequest, code="previous_response_not_found"):
    """There is no turn with the id that the request continues."""


class Unauthorized(ProxyError, status=401, code="unauthorized", retries_help=False):
    """The client's key is missing or wrong."""


class ClaudeNotLoggedIn(ProxyError, status=401, code="claude_not_logged_in", retries_help=False):
    """The CLI has no login."""


class NotFound(ProxyError, status=404, code="not_found", retries_help=False):
    """There is no agent, turn, session or route of this name."""


class MethodNotAllowed(ProxyError, status=405, code="method_not_allowed", retries_help=False):
    """The route exists, but not for this HTTP method."""


class SessionBusy(ProxyError, status=409, code="session_busy"):
    """Another program is writing the session."""


class ApprovalAnswered(ProxyError, status=409, code="approval_answered", retries_help=False):
    """Somebody else has answered the approval, or its time is over."""


class RequestTooLarge(ProxyError, status=413, code="request_too_large", retries_help=False):
    """The request is larger than `max_body`, or than the provider allows."""


class QueueFull(ProxyError, status=429, code="queue_full"):
    """Too many turns wait, or too many requests are open."""


class RateLimited(ProxyError, status=429, code="rate_limited"):
    """The provider's limit. `retry_after`: until it is reset, as the provider says."""


class BudgetExceeded(ProxyError, status=429, code="budget_exceeded"):
    """A budget is used up. `retry_after`: until its period ends. `account`: whose budget; None if only running turns
    use it up."""

    account: str | None = None


class TurnCancelled(ProxyError, status=499, code="turn_cancelled", retries_help=False):
    """`detail.by` says who cancelled it."""


class UpstreamError(ProxyError, status=502, code="upstream_error"):
    """The CLI, the provider or another server failed."""


class ClaudeUnavailable(ProxyError, status=503, code="claude_unavailable"):
    """The CLI is missing or cannot be used."""


class StoreUnavailable(ProxyError, status=503, code="store_unavailable"):
    """The store cannot be read or written."""


class Interrupted(ProxyError, status=503, code="interrupted"):
    """The proxy stopped before the turn was finished."""


class LeaseLost(ProxyError, status=503, code="lease_lost"):
    """Another proxy has taken the agent over."""


class TurnTimeout(ProxyError, status=504, code="turn_timeout"):
    """No answer came in time."""


class Overloaded(ProxyError, status=529, code="overloaded"):
    """The provider is overloaded."""


class SandboxError(ProxyError, status=500, code="sandbox_error"):
    """An agent's directory cannot be created, used or removed."""


class DamagedRow(ProxyError, status=500, code="damaged_row", retries_help=False):
    """A row of the store has content that this program never writes."""


class ConfigError(ProxyError, status=500, code="config_error", retries_help=False):
    """Wrong settings or options (exit code 2), or a wrong git repository of git memory."""


def _subclasses(cls: type[ProxyError]) -> list[type[ProxyError]]:
    return [cls, *(deeper for sub in cls.__subclasses__() for deeper in _subclasses(sub))]


def from_dict(data: dict[str, Any]) -> ProxyError:
    """The inverse of `ProxyError.as_dict`: an unknown code becomes an `UpstreamError`."""
    # Without the classes that inherit their code.
    by_code = {cls.code: cls for cls in _subclasses(ProxyError) if "code" in vars(cls)}
    return by_code.get(data.get("code", ""), UpstreamError)(
        str(data.get("message", "unknown error")),
        param=data.get("param"),
        retry_after=data.get("retry_after"),
        detail=data.get("detail"),
        retry=data.get("retry"),
    )


# The similarity from which a name counts as misspelt: `prot` and `port` have 0.75, `name` and `names` 0.89.
ALIKE = 0.7


def likely(given: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one probably means, in upper or lower case."""
    names = {name.casefold(): name for name in known}
    found = difflib.get_close_matches(given.casefold(), names, n=1, cutoff=ALIKE)
    return names[found[0]] if found else None


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """`: did you mean `x`?`; empty if no known name is similar."""
    meant = likely(given, known)
    return "" if meant is None else f": did you mean `{meant}`?"


def printable(text: str) -> str:
    """The text in one line, without control characters."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
