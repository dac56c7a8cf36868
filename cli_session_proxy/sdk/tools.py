"""The caller's Python functions as tools: describes them to the model and runs its calls.

A function's name, docstring and signature describe it; pydantic makes the JSON Schema of its arguments and checks
them at each call. A call's exception becomes its result for the model: only the caller's cancellation ends the round.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import ArgsKwargs, to_json

from ..domain.client_tools import checked
from ..domain.models import Tool
from ..errors import InvalidRequest

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Call:
    """The model's call of a function. `id` is the provider's."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Returned:
    """The result of a call, as text for the model."""

    call: Call
    text: str
    is_error: bool = False


class Toolbox:
    """The functions of one `ask`. Raises `InvalidRequest` for a function that cannot be described to a model."""

    def __init__(self, functions: Sequence[Function]) -> None:
        self._adapters: dict[str, TypeAdapter[Any]] = {}
        self._functions: dict[str, Function] = {}
        tools = []
        for at, function in enumerate(functions):
            where = f"tools[{at}]"
            name = getattr(function, "__name__", "")
            if not callable(function) or not name.isidentifier():
                raise InvalidRequest(f"{where} must be a named function (def or async def)", param=where)
            try:
                adapter: TypeAdapter[Any] = TypeAdapter(cast(Any, function))
                schema = adapter.json_schema()
            except (PydanticUserError, NameError, TypeError) as exc:
                why = str(exc).partition("\n")[0]
                raise InvalidRequest(
                    f"{where}: the arguments of {name} cannot be described to a model ({why}): give each a name and a "
                    "type of JSON's, a pydantic model or a dataclass",
                    param=where,
                ) from exc
            tools.append(Tool(name, inspect.getdoc(function) or "", schema))
            self._adapters.setdefault(name, adapter)
            self._functions.setdefault(name, function)
        self.tools: tuple[Tool, ...] = checked(tools)

    async def run(self, calls: Sequence[Call]) -> list[Returned]:
        """Run all calls concurrently. Returns their results in the order of the calls.

        Coroutine functions run on the caller's loop and are cancelled with the caller. Plain functions run in
        threads, which cannot be interrupted: after a cancellation they run to their end, and their result is dropped.
        """
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._run(call)) for call in calls]
        return [task.result() for task in running]

    async def _run(self, call: Call) -> Returned:
        adapter = self._adapters.get(call.name)
        if adapter is None:
            known = ", ".join(self._adapters) or "none"
            return Returned(call, f"there is no tool {call.name!r} (there are: {known})", is_error=True)
        given = ArgsKwargs((), dict(call.arguments))
        try:
            if inspect.iscoroutinefunction(self._functions[call.name]):
                value = adapter.validate_python(given)  # checks the arguments, then calls
            else:
                value = await asyncio.to_thread(adapter.validate_python, given)
            if inspect.isawaitable(value):
                value = await value
            text = value if isinstance(value, str) else to_json(value, serialize_unknown=True).decode()
        except ValidationError as exc:
            return Returned(call, f"the arguments are not valid: {faults(exc)}", is_error=True)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return Returned(call, "the tool was cancelled", is_error=True)
        except Exception as exc:  # noqa: BLE001 - whatever a tool raises is its result
            return Returned(call, f"{type(exc).__name__}: {exc}", is_error=True)
        return Returned(call, text)


def faults(exc: ValidationError) -> str:
    """The validation errors in one line, without the values, which may be long."""
    errors = exc.errors(include_url=False, include_input=False, include_context=False)
    return "; ".join(f"{'.'.join(str(part) for part in one['loc']) or 'it'}: {one['msg']}" for one in errors)
