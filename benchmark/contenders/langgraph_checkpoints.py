"""LangGraph with a checkpointer over ChatAnthropic, as its page on memory builds it: the state is a list of messages,
the thread is the conversation. `Sqlite` keeps checkpoints in a file, `Postgres` in the database of DATABASE_URL."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, MessagesState, StateGraph


class Checkpointed:
    def __init__(self, folder: str, base_url: str) -> None:
        self.folder, self.base_url = folder, base_url
        self.graph: Any = None
        self.making = asyncio.Lock()

    async def saver(self) -> Any:
        raise NotImplementedError

    async def ask(self, agent: str, words: str, model: str) -> str:
        async with self.making:
            if self.graph is None:
                building = StateGraph(MessagesState)
                building.add_node("model", self.call_model)
                building.add_edge(START, "model")
                self.graph = building.compile(checkpointer=await self.saver())
        config = {"configurable": {"thread_id": agent, "model": model}}
        state = await self.graph.ainvoke({"messages": [{"role": "user", "content": words}]}, config)
        return str(state["messages"][-1].text)

    async def call_model(self, state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        name = config["configurable"]["model"]
        model = ChatAnthropic(model_name=f"claude-{name}-4-5", base_url=self.base_url, timeout=60, stop=None)
        return {"messages": [await model.ainvoke(state["messages"])]}


class Sqlite(Checkpointed):
    async def saver(self) -> Any:
        import aiosqlite
        from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

        found = AsyncSqliteSaver(await aiosqlite.connect(f"{self.folder}/checkpoints.sqlite"))
        await found.setup()
        return found


class Postgres(Checkpointed):
    async def saver(self) -> Any:
        from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
        from psycopg.rows import dict_row
        from psycopg_pool import AsyncConnectionPool

        settings = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
        pool = AsyncConnectionPool(os.environ["DATABASE_URL"], kwargs=settings, open=False)
        await pool.open()
        found = AsyncPostgresSaver(pool)
        await found.setup()
        return found
