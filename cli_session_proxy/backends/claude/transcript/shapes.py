"""Schemas of transcript records, for the fields that are read here.

Others write to transcripts, too, and every reader relies on these types. An invalid record counts as damage, like a
line that is no JSON. Texts may have half surrogate pairs: a CLI cuts a long output anywhere. Other fields are not
checked: a newer CLI may have more.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, InstanceOf, StringConstraints, TypeAdapter, with_config
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

Id = Annotated[str, StringConstraints(pattern=r"^[!-~]{1,256}$")]
Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Words = InstanceOf[str]
Object = dict[str, Any]


class _Text(TypedDict):
    type: Literal["text"]
    text: Words
    id: NotRequired[Words]


class _Thinking(TypedDict):
    type: Literal["thinking"]
    thinking: Words
    id: NotRequired[Words]


class _Call(TypedDict):
    type: Literal["tool_use"]
    id: Words
    name: Words


class _Result(TypedDict):
    type: Literal["tool_result"]
    tool_use_id: Words
    content: NotRequired[Words | list[Block] | None]
    id: NotRequired[Words]


class _Source(TypedDict):
    type: Words
    data: NotRequired[Words]
    media_type: NotRequired[Words]


class _Media(TypedDict):
    type: Literal["image", "document"]
    source: _Source
    id: NotRequired[Words]


@with_config(ConfigDict(regex_engine="python-re"))  # the default engine has no negative lookahead
class _Other(TypedDict):
    type: NotRequired[
        Annotated[str, StringConstraints(pattern=r"^(?!(text|thinking|tool_use|tool_result|image|document)$)")]
    ]
    id: NotRequired[Words]
    tool_use_id: NotRequired[Words]


_Known = Annotated[_Text | _Thinking | _Call | _Result | _Media, Field(discriminator="type")]
Block = Annotated[_Known | _Other, Field(union_mode="left_to_right")]


class _MessageFields(TypedDict):
    id: NotRequired[Words | None]
    stop_reason: NotRequired[Word | None]
    usage: NotRequired[Object | None]


class _NoteMessage(_MessageFields):
    content: NotRequired[Words | list[Block]]


class _Message(_MessageFields):
    content: Words | list[Block]


class _TranscriptLine(TypedDict):
    uuid: Id
    parentUuid: Id | None
    logicalParentUuid: NotRequired[Id | None]
    sourceToolAssistantUUID: NotRequired[Id | None]
    timestamp: NotRequired[Words]
    compactMetadata: NotRequired[Object | None]


class _Record(_TranscriptLine):
    message: NotRequired[_NoteMessage]


class _MessageRecord(_TranscriptLine):
    message: _Message


# For lines with a `uuid`: user and assistant records; all others.
MESSAGE = TypeAdapter(_MessageRecord).validator
RECORD = TypeAdapter(_Record).validator
