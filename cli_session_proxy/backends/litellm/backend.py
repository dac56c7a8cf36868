"""Runs turns on models that LiteLLM reaches: sends the path as messages. Nothing is kept outside the chain.

A turn's exchange is also stored as records of the CLI, so that the CLI's next session has it like its own turns. The
CLI's backend makes these records (`scribe`).
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from ...domain.client_tools import CallIds, short_name
from ...domain.evidence import Evidence, Note
from ...domain.lineage import Past, answer_text
from ...domain.models import JSON, Agent, Block, Continuity, Link, Record, Session, Turn, Usage
from ...domain.options import ParameterName, left_out
from ...domain.sizes import CHARACTERS_PER_TOKEN, size_of
from ...errors import Overloaded, ProxyError, UpstreamError
from ...settings import ModelSettings, Settings
from ...stores.base import KeptTurn, Store
from ..base import (
    Activity,
    AnswerBlocks,
    Answered,
    Called,
    Completed,
    Event,
    Job,
    Lost,
    Refused,
    Retried,
    Used,
    last_records,
)
from . import messages, stream
from .library import Clients, error_for, is_content_refusal, litellm
from .messages import Rendering
from .summary import HEADER, TOKENS, Summaries

NAME = "litellm"
# Seconds before the first retry of a failed request; doubled for each further one. The provider's Retry-After counts if
# it is longer; if it is longer than LONGEST_WAIT, there is no retry.
FIRST_WAIT = 0.5
LONGEST_WAIT = 10.0
_STOPS = {"length": "max_tokens", "content_filter": "refusal"}
_EFFORTS = {"max": "high", "xhigh": "high"}


# The records of exchanges as the CLI would have written them; see `base.Backend.history_records`.
Scribe = Callable[[Agent, Turn | None, Sequence[Record], Sequence[Past], str], Iterator[tuple[Record, ...]]]


@dataclass(frozen=True, slots=True)
class Target:
    """One configured model, and its abilities as known to LiteLLM."""

    name: str
    configured: ModelSettings
    provider: str
    key: str | None = field(repr=False)
    images: bool
    documents: bool
    tools: bool
    context: int | None

    def cost(self, used: Usage) -> float | None:
        """US dollars by LiteLLM's price list; None if the model is not in it."""
        try:
            prompt_cost, answer_cost = litellm().cost_per_token(
                model=self.configured.litellm,
                prompt_tokens=used.prompt_tokens,
                completion_tokens=used.output_tokens,
                cache_read_input_tokens=used.cache_read_tokens,
                cache_creation_input_tokens=used.cache_write_tokens,
            )
        except Exception:  # noqa: BLE001 - LiteLLM raises many kinds for a model without a price
            return None
        total = float(prompt_cost) + float(answer_cost)
        return total if math.isfinite(total) else None

    def supports(self, **parameters: Any) -> bool:
        """Whether these parameters reach the provider: LiteLLM drops those that the model does not support."""
        optional = litellm().utils.get_optional_params
        known = {"model": self.configured.litellm, "custom_llm_provider": self.provider, "drop_params": True}
        return bool(optional(**known, **parameters) != optional(**known))


def target_of(settings: Settings, name: str) -> Target:
    """Called at start. Raises `ConfigError` for a missing key or a name that LiteLLM does not know."""
    configured = settings.models[name]
    module = litellm()
    _, provider, _, base = module.get_llm_provider(configured.litellm, api_base=configured.api_base)
    settings.refuse_loop(name, base)
    known: JSON = {}
    with suppress(Exception):  # a self-hosted model is in no list
        known = dict(module.get_model_info(configured.litellm))

    def takes(setting: bool | None, what: str) -> bool:
        # Unknown to LiteLLM: assume yes; if not, the server answers with an error.
        return setting if setting is not None else not known or bool(known.get(f"supports_{what}"))

    return Target(
        name,
        configured,
        provider,
        settings.key_of(name),
        takes(configured.images, "vision"),
        takes(configured.documents, "pdf_input"),
        takes(configured.tools, "function_calling"),
        known.get("max_input_tokens"),
    )


@dataclass(frozen=True, slots=True)
class Path:
    """The path of a turn, as far as it fits into the window."""

    turns: tuple[Turn, ...]  # the earlier turns that the model is shown
    outside: tuple[Turn, ...]  # those before them, which are left out
    tokens: int  # an estimate, with the system prompt and the new turn


class LiteLLMBackend:
    """Runs turns on `[models.*]`. One per engine. Raises `ConfigError` for a model that cannot be used."""

    def __init__(self, settings: Settings, store: Store, scribe: Scribe) -> None:
        self.settings = settings
        self.store = store
        self.scribe = scribe
        self.targets = {name: target_of(settings, name) for name in settings.models}
        self.clients = Clients()
        self.summaries = Summaries()

    async def close(self) -> None:
        await self.clients.close()

    async def can_take(self, job: Job) -> bool:
        """See `base.Backend`. Decided by the settings and by LiteLLM's data of the model."""
        target, path = self.targets[job.model], await self._path(job)
        asked = [block for message in job.turn.input for block in message.content]
        earlier = (block for turn in path.turns for one in turn.input for block in one.content)
        kinds = messages.kinds_in([*asked, *earlier])
        if ("image" in kinds and not target.images) or ("document" in kinds and not target.documents):
            return False
        if job.offers and not target.tools:
            return False
        return target.context is None or path.tokens <= target.context

    async def prepare(self, job: Job) -> ModelExecution:
        target, path = self.targets[job.model], await self._path(job)
        rendering = Rendering(target.images, target.documents, target.configured.thinking_as_text)
        # Blocks that the core added to the prompt come after the client's own, and only in this request.
        from_client = [block for message in job.turn.shown_input for block in message.content]
        added = [block for block in job.prompt if block not in from_client]
        turns = ((turn.shown_input, turn.output) for turn in path.turns)
        request_messages = await asyncio.to_thread(rendering.messages, turns, job.turn.shown_input, added)
        notes = [*rendering.notes, *([Note("outside_window", len(path.outside))] if path.outside else [])]
        costs: list[float] = []
        summary = None
        if path.outside and target.configured.window_summary:
            ask = partial(self._answer_to, target, costs)
            summary = await self.summaries.of(target.name, path.outside, target.context, ask)
            not_summarised = len(path.outside) if summary is None else summary.silent
            notes += [Note("not_summarised", not_summarised)] if not_summarised else []
        if summary is not None:
            first = next(message for message in request_messages if message["role"] == "user")
            content, summary_text = first["content"], f"{HEADER}\n{summary.text}"
            if isinstance(content, str):
                first["content"] = f"{summary_text}\n\n{content}"
            else:
                first["content"] = [{"type": "text", "text": summary_text}, *content]
        used_ids = CallIds((*path.outside, *path.turns))
        if job.system:
            request_messages.insert(0, {"role": "system", "content": job.system})
        evidence = Evidence(notes=tuple(notes), window_summary=summary.text if summary is not None else None)
        return ModelExecution(self, job, target, request_messages, used_ids, evidence, sum(costs))

    async def _answer_to(self, target: Target, costs: list[float], text: str) -> str:
        """The model's answer to one text, outside of any conversation. Its cost is appended to `costs`. Raises
        `ProxyError`."""
        answer = stream.ModelAnswer({}, CallIds())
        prompt = [{"role": "user", "content": text}]
        async with aclosing(self.request(target, prompt, {"max_tokens": TOKENS}, answer)) as events:
            async for _ in events:
                pass
        for _ in answer.close():
            pass
        costs.append(target.cost(answer.usage or Usage()) or 0.0)
        return answer_text(answer.blocks)

    async def request(
        self, target: Target, request_messages: list[JSON], parameters: JSON, answer: stream.ModelAnswer
    ) -> AsyncGenerator[Event, None]:
        """The events of one request, whose answer is collected in `answer`. Raises `ProxyError`."""
        configured = target.configured
        response: Any = None
        self.clients.use()  # so that `close` closes LiteLLM's connections
        try:
            response = await litellm().acompletion(
                **configured.params | parameters,
                model=configured.litellm,
                messages=request_messages,
                stream=True,
                stream_options={"include_usage": True},
                api_base=configured.api_base,
                api_key=target.key,
                timeout=self.settings.turn_timeout,
                drop_params=True,
                max_retries=0,
                num_retries=0,
            )
            async for chunk in response:
                has_events = False
                for event in answer.feed(chunk):
                    has_events = True
                    yield event
                if not has_events:
                    yield Activity("chunk")
        except ProxyError:
            raise
        except Exception as exc:
            if is_content_refusal(exc):
                answer.finish = "content_filter"
                return
            raise error_for(exc, target.name, target.key) from exc
        finally:
            if response is not None:
                await response.aclose()

    async def _path(self, job: Job) -> Path:
        turns = await self.store.path(job.parent.id) if job.parent is not None else []
        return await asyncio.to_thread(_path_in_window, turns, job)

    async def records(self, job: Job, output: Sequence[Block]) -> tuple[Record, ...]:
        """The exchange as the CLI would have written it after the path's last records."""
        last = await last_records(self.store, job.parent)
        exchanges = [Past(job.turn.shown_input, tuple(output))]

        def write() -> tuple[Record, ...]:
            return next(iter(self.scribe(job.agent, job.parent, last, exchanges, job.model)))

        return await asyncio.to_thread(write)


def _path_in_window(turns: Sequence[Turn], job: Job) -> Path:
    parents: list[Turn | None] = [None, *turns]
    sizes = [size_of(turn, parent) for turn, parent in zip([*turns, job.turn], parents, strict=True)]
    first = left_out(job.window, sizes)
    tokens = len(job.system or "") // CHARACTERS_PER_TOKEN + sum(size.tokens for size in sizes[first:])
    return Path(tuple(turns[first:]), tuple(turns[:first]), tokens)


class ModelExecution:
    """One turn on one model. `base.Execution`."""

    backend = NAME
    who = "the model"
    keeps_path = True  # the library has the messages, also for another try

    def __init__(
        self,
        backend: LiteLLMBackend,
        job: Job,
        target: Target,
        request_messages: list[JSON],
        used_ids: CallIds,
        evidence: Evidence,
        other_costs: float,
    ) -> None:
        self._backend = backend
        self._job = job
        self._target = target
        self._messages = request_messages
        self._used_ids = used_ids
        self._interrupted = False
        session, parent = job.session, job.parent
        self.session_id = session.id if session is not None else str(uuid.uuid4())
        self.continuity: Continuity = "started" if parent is None else "resumed"
        self.links: tuple[Link, ...] = ()
        if session is None:
            before = parent.session_id if parent is not None else None
            reason: Literal["branched", "started"] = "branched" if before is not None else "started"
            self.continuity = reason
            self.links = (Link(before, self.session_id, job.turn.id, reason, {}, time.time()),)
        self.evidence = evidence
        self._other_costs = other_costs  # of requests for summaries, in US dollars
        self._parameters, self.unmet = _parameters(job, target)

    async def say(self) -> AsyncGenerator[Event, None]:
        answer = stream.ModelAnswer({short_name(tool.name): tool for tool in self._job.offers.tools}, self._used_ids)
        tried = 0
        while True:
            begun = False
            try:
                asking = self._backend.request(self._target, self._messages, self._parameters, answer)
                async with aclosing(asking) as events:
                    async for event in events:
                        begun = True
                        yield event
                        if self._interrupted:
                            break
                break
            except ProxyError as error:
                may_pass = isinstance(error, Overloaded) or (isinstance(error, UpstreamError) and error.retry)
                soon = (error.retry_after or 0.0) <= LONGEST_WAIT
                if begun or not may_pass or not soon or tried >= self._backend.settings.cli_retries:
                    raise
                tried += 1
                yield Retried({"error_status": error.detail.get("status"), "error": error.code, "attempt": tried})
                await asyncio.sleep(max(error.retry_after or 0.0, FIRST_WAIT * 2 ** (tried - 1)))
        for block_stop in answer.close():
            yield block_stop
        if self._interrupted:
            counted = answer.usage
            if counted is None:  # no usage comes with an answer that we ended
                count, model = litellm().token_counter, self._target.configured.litellm
                text = "".join(str(block.get("text") or block.get("thinking") or "") for block in answer.blocks)
                counted = await asyncio.to_thread(
                    lambda: Usage(
                        int(count(model=model, messages=self._messages)),
                        int(count(model=model, text=text)) if text else 0,
                    )
                )
            yield AnswerBlocks(tuple(answer.blocks), answer.model)
            yield Completed("stop_sequence", counted, self._cost(counted))
            return
        used = answer.usage or Usage()
        cost = self._cost(used)
        stop = _STOPS.get(answer.finish or "", "end_turn")
        if stop == "refusal":
            yield AnswerBlocks(tuple(answer.blocks), answer.model)
            yield Refused("content_filter", None, used)
            return
        calls = [] if stop == "max_tokens" else answer.calls()
        if answer.finish is None and not answer.blocks and not calls:
            raise UpstreamError(f"{self._target.name}: the provider's answer is empty: send it again")
        yield Used(used, cost)
        await self._examine(calls)
        for event in stream.shown(calls, len(answer.blocks)):
            yield event
        yield AnswerBlocks((*answer.blocks, *calls), answer.model)
        yield Called(tuple(calls), used, cost) if calls else Completed(stop, used, cost)

    async def _examine(self, calls: Sequence[Block]) -> None:
        """Raises `Lost`, for another attempt, if a call is not allowed or a strict tool's arguments are invalid."""
        choice = self._job.turn.options.tool_choice
        offers = {tool.name: tool for tool in self._job.offers.tools}
        for number, call in enumerate(calls):
            tool = offers[call["name"]]
            fault = None
            if choice.mode == "none" or (choice.allowed is not None and tool.name not in choice.allowed):
                fault = f"the model called {tool.name!r}, which may not be called now"
            elif number and not choice.parallel:
                fault = "the model made several calls at once, and only one is allowed"
            elif tool.strict and (found := await self._job.check(call["input"], tool.schema)) is not None:
                fault = f"the model called {tool.name!r} with arguments that are not valid: {found}"
            if fault is not None:
                raise Lost(fault, UpstreamError(f"{fault}; send it again"))

    async def interrupt(self) -> None:
        self._interrupted = True

    async def keep(self, answered: Answered) -> tuple[KeptTurn, Evidence]:
        job = self._job
        records = await self._backend.records(job, answered.output)
        new = Session(self.session_id, job.agent.key, job.turn.id, "", "", job.turn.created_at)
        # Without a mark: the CLI's file ends before this turn, so it is rewritten before the CLI's next turn.
        session = new if job.session is None else replace(job.session, tip_turn_id=job.turn.id, mark=None)
        return KeptTurn(records, session), Evidence(records="model")

    async def release(self) -> None: ...

    async def discard(self, *, owned: bool) -> None: ...

    def _cost(self, used: Usage) -> float | None:
        """With the cost of the other requests; None if the model's price is unknown."""
        cost = self._target.cost(used)
        return None if cost is None else cost + self._other_costs


def _parameters(job: Job, target: Target) -> tuple[JSON, tuple[ParameterName, ...]]:
    """The request's parameters as LiteLLM's, and the names of those that the model does not support."""
    requested, choice = job.turn.options.parameters, job.turn.options.tool_choice
    out: JSON = {}
    unmet: list[ParameterName] = []
    plain: tuple[ParameterName, ...] = ("max_tokens", "temperature", "top_p", "top_k", "seed")
    for name in plain:
        value = getattr(requested, name)
        if value is None:
            continue
        if name != "top_k" and target.supports(**{name: value}):
            out[name] = value
        else:
            unmet.append(name)
    effort = _EFFORTS.get(job.effort or "", job.effort)
    if effort is not None and target.supports(reasoning_effort=effort):
        out["reasoning_effort"] = effort
    elif requested.thinking is False and target.supports(reasoning_effort="low"):
        unmet.append("thinking")  # the model cannot turn thinking off
    if job.offers:
        out["tools"] = messages.offered(job.offers.tools, choice.allowed)
        tool_choice: Any = choice.mode if choice.mode != "auto" else None
        if choice.mode == "required" and choice.allowed is not None and len(choice.allowed) == 1:
            (entry,) = (one for one in out["tools"] if one["function"]["name"] == short_name(choice.allowed[0]))
            tool_choice = {"type": "function", "function": {"name": entry["function"]["name"]}}
        if tool_choice is not None and target.supports(tools=out["tools"], tool_choice=tool_choice):
            out["tool_choice"] = tool_choice
        elif choice.mode == "required":
            unmet.append("tool_choice")
        if not choice.parallel and target.supports(parallel_tool_calls=False):
            out["parallel_tool_calls"] = False
    return out, tuple(unmet)
