"""The Claude Agent SDK with a SessionStore that keeps entries in a file of each session: what it mirrors is what it
resumes from. Which session is whose is the application's to keep: the id of the last result, in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, SessionStore, query


class Files(SessionStore):
    """Lines of JSON. An entry with a `uuid` that is there already is not appended again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def place(self, key: Any) -> Path:
        parts = (key["project_key"], key["session_id"], key.get("subpath") or "")
        return self.folder / quote("/".join(parts), safe="")

    async def append(self, key: Any, entries: list[Any]) -> None:
        known = {entry.get("uuid") for entry in await self.load(key) or ()} - {None}
        with self.place(key).open("a", encoding="utf-8") as file:
            for entry in entries:
                if entry.get("uuid") not in known:
                    file.write(json.dumps(entry) + "\n")

    async def load(self, key: Any) -> list[Any] | None:
        if not self.place(key).exists():
            return None
        return [json.loads(line) for line in self.place(key).read_text(encoding="utf-8").splitlines()]


class Resumed:
    def __init__(self, folder: str, base_url: str) -> None:
        self.folder = Path(folder)
        self.store = Files(self.folder / "entries")

    async def ask(self, agent: str, words: str, model: str) -> str:
        place = self.folder / "cwd" / agent
        place.mkdir(parents=True, exist_ok=True)
        session = self.folder / f"{agent}.session"
        options = ClaudeAgentOptions(
            model=model, system_prompt="You are a helpful assistant.", tools=[], setting_sources=[], cwd=place,
            session_store=self.store, resume=session.read_text() if session.exists() else None,
        )  # fmt: skip

        async def said() -> Any:
            yield {"type": "user", "message": {"role": "user", "content": words}}

        async for message in query(prompt=said(), options=options):
            if isinstance(message, ResultMessage):
                if message.is_error:
                    raise RuntimeError(message.subtype)
                session.write_text(message.session_id)
                return message.result or ""
        raise RuntimeError("no result")
