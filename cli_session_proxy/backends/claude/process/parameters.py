"""Sets a turn's parameters in a running CLI, by environment variables.

Run on 2.1.330: after the control request `apply_flag_settings` the next request to the model has another `max_tokens`,
and the fields in `CLAUDE_CODE_EXTRA_BODY`. A change takes one control round trip (5 ms) and no new process; earlier
messages stay byte-identical.
docs/contract/routes.md states the rules of combination.

- All requests of the CLI have these fields, also a compaction's, whose summary would be cut at `max_tokens`. So
compaction is off in such a turn, and parameters are not used with the CLI's own tools, which send requests themselves.
- Nothing is sent that the provider refuses: the model's id decides what it accepts. An unknown model gets nothing that
newer models refuse.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass

from ....domain.client_tools import Offers, cli_name
from ....domain.models import JSON, PLAIN, ToolChoice, TurnOptions
from ....domain.options import ParameterName, Parameters
from ...base import Job
from .process import NO_COMPACTION, ClaudeProcess

MAX_TOKENS = "CLAUDE_CODE_MAX_OUTPUT_TOKENS"
EXTRA_BODY = "CLAUDE_CODE_EXTRA_BODY"
NO_THINKING = "CLAUDE_CODE_DISABLE_THINKING"

# The provider's least thinking budget (its documentation). A shorter answer would be thinking only: so thinking is
# turned off unless the client wants it.
LEAST_THINKING = 1024
# A compaction's summary has up to 20,000 tokens (2.1.330): with a lower limit the CLI must not compact.
SUMMARY = 20_000
# The provider's temperature goes to 1; OpenAI's and Google's to 2.
HOTTEST = 1.0

# `claude-sonnet-4-5-20250929`, `us.anthropic.claude-opus-5-v1:0`, `claude-3-5-haiku@20241022`
_MODEL = re.compile(
    r"claude-(?:(?P<family>[a-z]+)-)?(?P<major>\d)(?:[-.](?P<minor>\d{1,2}))?(?!\d)(?:-(?P<last>[a-z]+))?"
)
_KNOWN = frozenset({"opus", "sonnet", "haiku"})


@dataclass(frozen=True, slots=True)
class Takes:
    """What a model accepts, by the provider's documentation ("Models", "Extended thinking", "Tool use").

    `samples`: temperature, top_p and top_k, if the model does not think. `samples_together`: temperature and top_p in
    one request. `forced`: a tool_choice that forces a call, if the model does not think. `off`: the field `thinking`
    that turns thinking off ({}: thinking is off without the field; None: nothing turns it off). `on_above_high`: at an
    effort above high nothing turns it off. `thinks`: the CLI asks the model to think. `effort`: the model takes an
    effort, and thinks less at a low one.
    """

    samples: bool = False
    samples_together: bool = False
    forced: bool = False
    off: JSON | None = None
    on_above_high: bool = False
    thinks: bool = True
    effort: bool = False

    @staticmethod
    def of(model: str | None) -> Takes:
        """By the model's id. A model of an unknown family gets only what every model accepts."""
        parts = _MODEL.search(model or "")
        family = (parts["family"] or parts["last"]) if parts else None
        if parts is None or family not in _KNOWN:
            return Takes()
        version = int(parts["major"]), int(parts["minor"] or 0)
        if version < (4, 0):
            return Takes(samples=True, samples_together=True, forced=True, off={}, thinks=version >= (3, 7))
        if version < (5, 0):
            return Takes(samples=version < (4, 7), samples_together=version == (4, 0), forced=True, off={})
        if version == (5, 0):  # thinks by default
            return Takes(forced=True, off={"type": "disabled"}, on_above_high=True)
        if version == (5, 5) and family != "opus":
            return Takes(off={"type": "between_tools" if family == "sonnet" else "disabled"})
        return Takes(effort=True)


def has_parameters(options: TurnOptions) -> bool:
    """Whether the request has parameters that `apply` sets."""
    return (options.tool_choice, options.stop, options.parameters) != (PLAIN.tool_choice, PLAIN.stop, PLAIN.parameters)


def fields_of(
    options: TurnOptions, offers: Offers, takes: Takes, *, effort: str | None = None, stays_off: bool = False
) -> tuple[dict[str, str], JSON, list[ParameterName]]:
    """(environment, fields of the request, parameters without effect). `stays_off`: the turn answers calls of a message
    without thinking, and such a message has to go on without.
    """
    requested, choice = options.parameters, options.tool_choice
    unmet: list[ParameterName] = []  # parameters without effect
    body: JSON = {}
    env: dict[str, str] = {}
    forced = choice.mode == "required" and bool(offers)
    can_be_off = takes.off is not None and not (takes.on_above_high and effort in ("xhigh", "max"))
    if forced and not (takes.forced and can_be_off):
        forced = False  # the model does not accept it, or cannot be kept from thinking
        unmet.append("tool_choice")
    is_short = (
        requested.max_tokens is not None and requested.max_tokens <= LEAST_THINKING and requested.thinking is None
    )
    off = can_be_off and (forced or stays_off or is_short or requested.thinking is False)
    if requested.thinking is not None and requested.thinking == off:  # the opposite of what was requested
        unmet.append("thinking")
        if requested.thinking is False and takes.effort and effort is None:  # then let it think as little as possible
            body["output_config"] = {"effort": "low"}
    if off:
        env[NO_THINKING] = "1"
        if takes.off:
            body["thinking"] = takes.off
    sampled = _sampling(requested, takes, unmet, thinks=takes.thinks and not off)
    body |= sampled | _choice(choice, offers, forced=forced)
    if stops := [stop for stop in options.stop if stop.strip()]:  # the provider refuses blank ones: the core cuts
        body["stop_sequences"] = stops
    if requested.seed is not None:
        unmet.append("seed")
    if requested.max_tokens is not None:
        env[MAX_TOKENS] = str(requested.max_tokens)
    if body or off or (requested.max_tokens or SUMMARY) < SUMMARY:  # these would apply to the summary's request, too
        env[NO_COMPACTION] = "1"
    return env, body, unmet


def _sampling(requested: Parameters, takes: Takes, unmet: list[ParameterName], *, thinks: bool) -> JSON:
    """Fields for temperature, top_p and top_k. Adds those to `unmet` that have no effect, all of them if the model
    thinks: thinking wins over sampling. A temperature or top_p of 1 is the default, and not sent."""
    values: dict[ParameterName, float] = {}
    if requested.temperature is not None and requested.temperature != HOTTEST:
        values["temperature"] = min(requested.temperature, HOTTEST)
    if requested.top_p is not None and requested.top_p < 1:
        values["top_p"] = requested.top_p
    if requested.top_k:
        values["top_k"] = requested.top_k
    if thinks or not takes.samples:
        unmet += values
        return {}
    if "top_p" in values and not takes.samples_together:  # with thinking off the CLI sends a temperature, too
        del values["top_p"]
        unmet.append("top_p")
    return {name: value for name, value in values.items()}  # noqa: C416 - the names become fields of JSON


def _choice(choice: ToolChoice, offers: Offers, *, forced: bool) -> JSON:
    """The field `tool_choice`, if it is not the default. `forced`: the model has to make a call."""
    if not offers:  # the provider refuses a choice without tools
        return {}
    if choice.mode == "none":
        return {"tool_choice": {"type": "none"}}
    field: JSON = {"type": "auto"}
    if forced:
        only_tool = choice.allowed[0] if choice.allowed is not None and len(choice.allowed) == 1 else None
        field = {"type": "any"} if only_tool is None else {"type": "tool", "name": cli_name(only_tool)}
    if not choice.parallel:
        field["disable_parallel_tool_use"] = True
    return {} if field == {"type": "auto"} else {"tool_choice": field}


async def apply(process: ClaudeProcess, job: Job, *, skip: bool, compacts: bool = True) -> tuple[ParameterName, ...]:
    """Set the parameters of the process's next turn, and reset those of earlier turns.

    Returns parameters without effect. `skip`: set none; `compacts` False: turn compaction off. Raises ProcessDied if
    the process may still have other values. A turn without parameters needs no call if none were set before
    (`ClaudeProcess.env_set`).
    """
    launch, options = process.launch, job.turn.options
    no_compaction = {} if compacts else {NO_COMPACTION: "1"}
    if skip or launch.profile.tools or not launch.capability.takes_parameters:
        await process.set_env(no_compaction if launch.capability.takes_parameters else {})
        return _all_requested(job)
    # With results the turn goes on with its parent's message.
    begun_with = job.parent.options if job.parent is not None and job.results else PLAIN
    had_to_call = begun_with.tool_choice.mode == "required" and bool(begun_with.tools)
    stays_off = begun_with.parameters.thinking is False or had_to_call
    # Only these depend on the model: ask the process for its id, if unknown.
    requested = options.parameters
    by_model = options.tool_choice.mode == "required" or stays_off or any(
        value is not None for value in (requested.temperature, requested.top_p, requested.top_k, requested.thinking)
    )  # fmt: skip
    is_short = requested.max_tokens is not None and requested.max_tokens <= LEAST_THINKING
    takes = Takes.of(await process.model()) if by_model or is_short else Takes()
    env, body, unmet = fields_of(options, job.offers, takes, effort=job.effort, stays_off=stays_off)
    env |= no_compaction
    configured = dict(launch.env)  # by the operator
    if body:
        extra: object = None  # the operator's extra fields of each request
        with suppress(ValueError):  # the CLI ignores invalid JSON, too
            extra = json.loads(configured.get(EXTRA_BODY) or "{}")
        env[EXTRA_BODY] = json.dumps((extra if isinstance(extra, dict) else {}) | body)
    if MAX_TOKENS in env and (limit := configured.get(MAX_TOKENS, "")).isdecimal():  # never above the operator's limit
        env[MAX_TOKENS] = str(min(int(env[MAX_TOKENS]), int(limit)))
    return tuple(unmet) if await process.set_env(env) else _all_requested(job)


def _all_requested(job: Job) -> tuple[ParameterName, ...]:
    """All requested parameters, which have no effect in a CLI that accepts none."""
    options = job.turn.options
    requested: list[ParameterName] = list(options.parameters.as_json())  # type: ignore[arg-type] # the fields are the names
    if options.tool_choice.mode == "required" and job.offers:
        requested.append("tool_choice")
    # Requested thinking is what such a CLI does anyway.
    return tuple(name for name in requested if not (name == "thinking" and options.parameters.thinking))
