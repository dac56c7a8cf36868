"""All errors for callers, as one tree.

    ProxyError
    ├── InvalidRequest        400 invalid_request          names the field in `param`
    │   ├── ContextTooLong    400 context_too_long
    │   └── PreviousNotFound  400 previous_response_not_found
    ├── Unauthorized          401 unauthorized
    ├── ClaudeNotLoggedIn     401 claude_not_logged_in
    ├── NotFound              404 not_found
    ├── MethodNotAllowed      405 method_not_allowed
    ├── SessionBusy           409 session_busy             somebody else is writing this session
    ├── ApprovalAnswered      409 approval_answered        somebody was quicker, or its time was over
    ├── RequestTooLarge       413 request_too_large
    ├── QueueFull             429 queue_full               `retry_after` in seconds
    ├── RateLimited           429 rate_limited             `retry_after` in seconds: the provider's real reset
    ├── BudgetExceeded        429 budget_exceeded          `retry_after` in seconds: when the budget begins anew
    ├── TurnCancelled         499 turn_cancelled           `detail.by` says by whom
    ├── UpstreamError         502 upstream_error
    ├── ClaudeUnavailable     503 claude_unavailable
    ├── StoreUnavailable      503 store_unavailable
    ├── Interrupted           503 interrupted              the proxy stopped before the turn was finished
    ├── LeaseLost             503 lease_lost               another proxy has taken the agent over
    ├── TurnTimeout           504 turn_timeout
    ├── Overloaded            529 overloaded
    ├── SandboxError          500 sandbox_error
    ├── DamagedRow            500 damaged_row              a row of the store holds what no write of ours leaves
    └── ConfigError           500 config_error             at start-up: exit code 2; or git memory

An error has data (status, code, param, retry_after, detail), and its text says what to do next. No error text has a
key, an environment or a prompt.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, ClassVar


class ProxyError(Exception):
    """Base of the tree. `status` is the HTTP status, `code` the stable name of the contract.

    `retry`: whether a client's own retry of the same request within a minute may succeed.
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


class InvalidRequest(ProxyError):
    status = 400
    code = "invalid_request"
    retries_help = False


class ContextTooLong(InvalidRequest):
    code = "context_too_long"


class PreviousNotFound(InvalidRequest):
    code = "previous_response_not_found"


class Unauthorized(ProxyError):
    status = 401
    code = "unauthorized"
    retries_help = False


class ClaudeNotLoggedIn(ProxyError):
    status = 401
    code = "claude_not_logged_in"
    retries_help = False


class NotFound(ProxyError):
    status = 404
    code = "not_found"
    retries_help = False


class MethodNotAllowed(ProxyError):
    status = 405
    code = "method_not_allowed"
    retries_help = False


class SessionBusy(ProxyError):
    status = 409
    code = "session_busy"


class ApprovalAnswered(ProxyError):
    status = 409
    code = "approval_answered"
    retries_help = False


class RequestTooLarge(ProxyError):
    status = 413
    code = "request_too_large"
    retries_help = False


class QueueFull(ProxyError):
    status = 429
    code = "queue_full"


class RateLimited(ProxyError):
    status = 429
    code = "rate_limited"


class BudgetExceeded(ProxyError):
    """`account`: whose limit is reached until its period ends; None if only running turns use it up."""

    status = 429
    code = "budget_exceeded"
    account: str | None = None


class TurnCancelled(ProxyError):
    status = 499
    code = "turn_cancelled"
    retries_help = False


class UpstreamError(ProxyError):
    status = 502
    code = "upstream_error"


class ClaudeUnavailable(ProxyError):
    status = 503
    code = "claude_unavailable"


class StoreUnavailable(ProxyError):
    status = 503
    code = "store_unavailable"


class Interrupted(ProxyError):
    status = 503
    code = "interrupted"


class LeaseLost(ProxyError):
    status = 503
    code = "lease_lost"


class TurnTimeout(ProxyError):
    status = 504
    code = "turn_timeout"


class Overloaded(ProxyError):
    status = 529
    code = "overloaded"


class SandboxError(ProxyError):
    status = 500
    code = "sandbox_error"


class DamagedRow(ProxyError):
    status = 500
    code = "damaged_row"
    retries_help = False


class ConfigError(ProxyError):
    status = 500
    code = "config_error"
    retries_help = False


def _subclasses(cls: type[ProxyError]) -> list[type[ProxyError]]:
    return [cls, *(deeper for sub in cls.__subclasses__() for deeper in _subclasses(sub))]


def from_dict(data: dict[str, Any]) -> ProxyError:
    """The inverse of `ProxyError.as_dict`: an unknown code becomes an `UpstreamError`."""
    by_code = {
        cls.code: cls for cls in _subclasses(ProxyError) if "code" in vars(cls)
    }  # not those that inherit their code
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
