"""Converts failures of the CLI to a `ProxyError`: a `Result` with an error, or a dead process.

An API error comes as subtype `success`, `is_error`, terminal_reason `api_error`; 2.1.x gives the provider's status
and type beside the text, 1.x only the text (both recorded in tests/claude/data). No prompt, key or environment is
passed on: only the CLI's own short text and the last output of a process without a result, short and redacted.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from .... import redact
from ....domain import limits
from ....domain.models import JSON
from ....errors import (
    ClaudeNotLoggedIn,
    ClaudeUnavailable,
    ContextTooLong,
    Interrupted,
    InvalidRequest,
    Overloaded,
    ProxyError,
    RateLimited,
    RequestTooLarge,
    SessionBusy,
    TurnTimeout,
    UpstreamError,
    likely,
)
from ....settings import MODELS
from ...base import Remedy
from .capability import UNKNOWN_OPTION, Capability
from .events import ProcessDied, Result, WrongTranscript

TEXT_LIMIT = 500
# Characters of a CLI's error text that are read, and how many errors. A program may imitate the CLI: redacting 60 MB
# took a minute, which blocked everybody else.
MOST_READ, MOST_ERRORS = 64 * 1024, 10
LAST_WORDS = 300  # characters of a process's last output
# The longest Retry-After that the SDKs of OpenAI and Anthropic heed, in seconds.
PATIENCE = 60.0

_STATUS = re.compile(r"API Error: (?:Request rejected \()?(\d{3})\b")
_LOGIN = re.compile(
    r"/login\b|not logged in|invalid (?:x-)?api[ -]key|failed to authenticate|oauth token", re.IGNORECASE
)
_OWN_ADVICE = re.compile(
    r"(?<![\s·.])[\s·.]*+please run /login[\s·.]*", re.IGNORECASE
)  # such a command only works in its own terminal
_BILLING = re.compile(r"credit balance", re.IGNORECASE)
_LIMIT = re.compile(r"limit reached|hit your .{0,40}limit|rate limit", re.IGNORECASE)
_CONTEXT = re.compile(r"prompt is too long|exceeds? (?:the )?context|context (?:window|length|limit)", re.IGNORECASE)
_TIMEOUT = re.compile(r"timed?[ -]?out\b", re.IGNORECASE)
# A 400 about something in the transcript: our fault, not the client's.
_HISTORY = re.compile(
    r"signature|`?thinking`?|tool_use|tool_result|tool use concurrency|cache_control|roles must alternate",
    re.IGNORECASE,
)

# The instruction of `commands.prerequisites` without this machine's paths, for clients.
NOT_LOGGED_IN = "run `cli-session-proxy login`, or set ANTHROPIC_API_KEY or CLAUDE_CODE_OAUTH_TOKEN and start again"


@dataclass(frozen=True, slots=True)
class _Facts:
    """The known facts of a failure. `status`: HTTP's; `kind`: the provider's error type; `text`: the error's text,
    short and redacted; `terminal_reason`: the CLI's; `wait`: seconds until the provider answers again; `model`: the
    requested one."""

    status: int | None
    kind: str
    text: str
    terminal_reason: str
    wait: float | None
    model: str

    @property
    def detail(self) -> JSON:
        fields = {"status": self.status, "type": self.kind or None, "terminal_reason": self.terminal_reason or None}
        return {name: value for name, value in fields.items() if value is not None}


def error_for(
    result: Result,
    *,
    retries: Sequence[JSON] = (),
    model: str = "",
    now: float | None = None,
    cli: str = "the Claude CLI",
) -> ProxyError:
    """The error of a turn with a failed `Result`. `retries`: details of the turn's `Retried` events; `model`: the
    requested one; `now`: the time in seconds (default: the clock's); `cli`: the CLI's name in the message.

    The error's `retry_after` is only set if the provider gave a time: its reset time, or the delay of its 429 that the
    CLI reported in `retries`.
    """
    facts = _facts(result, retries, model, time.time() if now is None else now)
    for applies, make in _CASES:
        if applies(facts):
            return make(facts)
    if (reason := result.detail.get("startup_failure_reason")) is not None:
        message = f"{cli} could not start ({reason}): {facts.text or 'it says no more'}; see `doctor`"
        return ClaudeUnavailable(message, detail=facts.detail)
    return UpstreamError(facts.text or f"{cli} failed ({result.subtype})", detail=facts.detail)


def _facts(result: Result, retries: Sequence[JSON], model: str, now: float) -> _Facts:
    errors = result.detail.get("errors")
    message = result.text[:MOST_READ]
    if not message and isinstance(errors, list):
        message = " ".join(str(error)[:MOST_READ] for error in errors[:MOST_ERRORS])
    match = _STATUS.search(message)
    # A 1.x CLI quotes the provider's error: `API Error: 400 {"type":"error","error":{…}}`.
    body: object = None
    with suppress(ValueError):  # 2.1.x quotes no body
        body = limits.loads(message[message.find("{") : message.rfind("}") + 1], limits.CLI_DEPTH)
    quoted = body.get("error") if isinstance(body, dict) else None
    error: JSON = quoted if isinstance(quoted, dict) else {}
    status = result.api_error_status or (int(match[1]) if match else None)
    kind = str(result.detail.get("api_error_type") or error.get("type") or "")[:TEXT_LIMIT]
    text = redact.text(" ".join(str(error.get("message") or message).split()))[:TEXT_LIMIT]
    return _Facts(status, kind, text, result.terminal_reason or "", _wait(result, message, retries, now), model)


def _wait(result: Result, message: str, retries: Sequence[JSON], now: float) -> float | None:
    """Seconds until the provider answers again; None if unknown."""
    limit = result.detail.get("rate_limit")
    reset = limits.number(limit.get("resetsAt")) if isinstance(limit, dict) else None
    if reset is not None:
        return max(1.0, reset - now)
    seconds = seconds_until(message, now)
    if seconds is not None:
        return seconds
    delays = [limits.number(retry.get("retry_delay_ms")) for retry in retries if retry.get("error_status") == 429]
    known = [delay / 1000 for delay in delays if delay is not None]
    return max(1.0, known[-1]) if known else None


def _not_logged_in(facts: _Facts) -> ProxyError:
    return ClaudeNotLoggedIn(f"{_OWN_ADVICE.sub('', facts.text)}: {NOT_LOGGED_IN}", detail=facts.detail)


def likely_model(model: str) -> str:
    """A hint at the model that an unknown name probably means, by its parts."""
    meant = [likely(word, MODELS) for word in re.split(r"[^A-Za-z]+", model) if word]
    return next((f": did you mean `{one}`?" for one in meant if one is not None and one != model), "")


def _limited(facts: _Facts) -> ProxyError:
    soon = facts.wait is None or facts.wait <= PATIENCE
    return RateLimited(facts.text, retry_after=facts.wait, detail=facts.detail, retry=None if soon else False)


# The first that applies. Login before the statuses (1.x has no status for it), limits before login.
_CASES: tuple[tuple[Callable[[_Facts], bool], Callable[[_Facts], ProxyError]], ...] = (
    (
        lambda f: f.terminal_reason.startswith("aborted"),
        # Not cancelled by us: we do not wait for a result then.
        lambda f: Interrupted("the CLI was interrupted in this turn: send it again", retry_after=1.0, detail=f.detail),
    ),
    (
        lambda f: (
            f.terminal_reason == "prompt_too_long" or (f.status in {None, 400} and _CONTEXT.search(f.text) is not None)
        ),
        lambda f: ContextTooLong(f"{f.text}: start a new chain or send less", detail=f.detail),
    ),
    (
        # Neither a bad login nor a temporary limit: the account needs a payment.
        lambda f: _BILLING.search(f.text) is not None,
        lambda f: UpstreamError(f"{f.text}: see the account's billing", detail=f.detail, retry=False),
    ),
    (lambda f: f.status == 429 or f.kind == "rate_limit_error", _limited),
    (lambda f: f.status is None and _LIMIT.search(f.text) is not None, _limited),
    (lambda f: f.status == 401 or f.kind == "authentication_error", _not_logged_in),
    # Also a 403: for it the CLI prints "Failed to authenticate" (2.1.x), "Please run /login" (1.x).
    (lambda f: f.status == 403 or (f.status is None and _LOGIN.search(f.text) is not None), _not_logged_in),
    (
        lambda f: f.status == 529 or f.kind == "overloaded_error",
        lambda f: Overloaded(f.text, detail=f.detail),
    ),
    (lambda f: f.status == 413, lambda f: RequestTooLarge(f.text, detail=f.detail)),
    (
        lambda f: f.status == 404 or f.kind == "not_found_error",
        lambda f: InvalidRequest(
            f"{f.text} (the provider does not know the model {f.model!r}{likely_model(f.model)})",
            param="model",
            detail=f.detail,
        ),
    ),
    (
        lambda f: f.status in {400, 422} and _HISTORY.search(f.text) is not None,
        lambda f: UpstreamError(f.text, detail=f.detail, retry=False),
    ),
    (lambda f: f.status in {400, 422}, lambda f: InvalidRequest(f.text, detail=f.detail)),
    (
        lambda f: f.status in {408, 504} or (f.status is None and _TIMEOUT.search(f.text) is not None),
        lambda f: TurnTimeout(f.text, detail=f.detail),
    ),
)


# Words in the provider's refusal, and what another attempt may leave out of the path.
_REMEDIES: tuple[tuple[re.Pattern[str], Remedy], ...] = (
    (re.compile(r"signature.{0,20}thinking|thinking`?(?: or `?redacted_thinking`?)? block", re.IGNORECASE), "thinking"),
    (re.compile(r"\b(?:images?\b|media)", re.IGNORECASE), "images"),
    (re.compile(r"\bpdf\b|\bdocument", re.IGNORECASE), "documents"),
    # A tool's definition begins with `tools.`. The last two are the CLI's words: calls and results do not fit together.
    (
        re.compile(
            r"^(?=.*\bmessages\.\d).*(?:tool_use|tool_result|Input tag)|tool use concurrency|in conversation history"
        ),
        "calls",
    ),
)


def remedies(error: ProxyError) -> tuple[Remedy, ...]:
    """Ways to retry the refused request, in order of loss."""
    if isinstance(error, ContextTooLong | RequestTooLarge):
        return ("images", "documents", "summary")
    if error.detail.get("status") not in (None, 400) or not isinstance(error, InvalidRequest | UpstreamError):
        return ()
    named, _, _ = error.message.partition("expected tags")  # behind these words are the types that it would take
    return tuple(remedy for words, remedy in _REMEDIES if words.search(named))


def no_words(result: Result, cli: Capability) -> ProxyError:
    """The error of a turn that the CLI reports as successful, but without an answer."""
    return UpstreamError(
        f"Claude CLI {cli.version} at {cli.path} ended the turn as a success with {result.usage.output_tokens} output "
        "tokens, and gave no words of an answer: nothing was kept. Send it again; if that does not help, this version "
        "prints what this proxy does not understand: use another one (--claude-bin), and see `doctor`",
        detail={"cli_version": cli.version, "output_tokens": result.usage.output_tokens},
    )


def error_for_death(died: ProcessDied) -> ProxyError:
    """The error of a turn whose process gave no result; quotes its last output."""
    cli, output = died.cli, last_output(died)
    detail: JSON = {} if died.returncode is None else {"exit_code": died.returncode}
    if isinstance(died, WrongTranscript):
        return SessionBusy(
            f"the session's transcript was changed while {cli} was loading it: nothing of its answer was kept. "
            "Stop what else writes to the CLI's directory, look at what tools may have done, and send this again",
            detail={"how": died.how},
        )
    if _LOGIN.search(died.stderr):
        return ClaudeNotLoggedIn(f"{cli} is not logged in{output}: {NOT_LOGGED_IN}", detail=detail)
    if "already in use" in died.stderr:
        message = f"another Claude CLI has this session open, says {cli}: end it and send the turn again"
        return SessionBusy(message, detail=detail)
    unknown = UNKNOWN_OPTION.search(died.stderr)
    if unknown is not None:
        message = f"{cli} does not know {unknown[1]}: use another version of it, and see `doctor`"
        return ClaudeUnavailable(message, detail=detail)
    if died.returncode in {126, 127}:
        return ClaudeUnavailable(f"{cli} could not be run{output}: see `doctor`", detail=detail)
    if died.no_conversation:
        return UpstreamError(f"{cli} lost the session: send the turn again", detail=detail)
    return UpstreamError(f"{cli} gave no result: {died.why}{output}; send the turn again", detail=detail)


def last_output(died: ProcessDied) -> str:
    """A process's last output, as a part of a sentence: of stderr, else the last lines of stdout that were no
    frames."""
    for where, text in (("stderr", died.stderr), ("stdout", died.notices)):
        words = redact.text(" ".join(text.split()))
        if words:
            return f' (it said last, on {where}: "{words[-LAST_WORDS:]}")'
    return ""


# --- the end of a usage limit, from the CLI's text

# Seen: `Claude AI usage limit reached|1760000000` (1.0.x), `5-hour limit reached ∙ resets 3:51am` (1.0.120),
# `You've hit your 5-hour limit · resets 3:51am (UTC)` (2.1.329); a weekly limit names the day: `resets Nov 25, 3am`.
_EPOCH = re.compile(r"limit reached\|(\d{10,13})\b")
_RESETS = re.compile(
    r"resets\s+(?:(?P<month>[A-Z][a-z]{2})[a-z]*\s+(?P<day>\d{1,2})(?:,|\s+at)?\s+)?"
    r"(?P<hour>\d{1,2})(?::(?P<minute>\d{2}))?\s*(?P<half>[ap]m)(?:\s*\((?P<zone>[\w/+-]+)\))?",
    re.IGNORECASE,
)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MILLISECONDS = 10**11  # an epoch above this cannot be in seconds


def seconds_until(text: str, now: float) -> float | None:
    """Seconds from `now` (epoch) to the reset that the text names, at least 1; None if it names none.

    A clock time without a zone is local time, for the CLI as for us: TZ is passed on to it.
    """
    epoch = _EPOCH.search(text)
    if epoch is not None:
        value = int(epoch[1])
        return max(1.0, (value / 1000 if value > _MILLISECONDS else value) - now)
    match = _RESETS.search(text)
    if match is None:
        return None
    here = datetime.fromtimestamp(now, _zone(match["zone"])).astimezone(_zone(match["zone"]))
    try:
        at = here.replace(
            hour=int(match["hour"]) % 12 + (12 if match["half"].lower() == "pm" else 0),
            minute=int(match["minute"] or 0), second=0, microsecond=0,
        )  # fmt: skip
        if match["month"]:
            at = at.replace(month=_MONTHS.index(match["month"].lower()) + 1, day=int(match["day"]))
            at = at if at > here else at.replace(year=at.year + 1)
        elif at <= here:
            at += timedelta(days=1)
    except ValueError:  # "resets 31:99pm" only looks like a time
        return None
    return max(1.0, at.timestamp() - now)


def _zone(name: str | None) -> tzinfo | None:
    try:
        return ZoneInfo(name) if name else None
    except (ZoneInfoNotFoundError, ValueError):
        return None
