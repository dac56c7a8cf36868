"""What a proxy that ended leaves in the store, settled by the next one, on the in-memory backend."""

from __future__ import annotations

from cli_session_proxy.backends.memory import MemoryBackend
from cli_session_proxy.engine.engine import Engine
from cli_session_proxy.settings import Settings

from ..talking import ask, request
from ..until import until
from .test_core import Model, core, settings, turns, words

__all__ = ["settings"]


async def killed(settings: Settings, *said: str) -> None:
    """A proxy that is gone while the first of these turns runs and the others wait."""
    model = Model()
    model.open.clear()
    engine = Engine(settings, backend=MemoryBackend(model))
    await engine.start()
    for text in said:
        await engine.submit(request(text))
    await model.reached.wait()
    engine._instances.leave(settled=False)  # as the kernel does when a proxy is killed
    engine.kill()


async def test_queued_turns_of_a_proxy_that_ended_are_cancelled_and_never_sent(settings: Settings) -> None:
    await killed(settings, "one", "two", "three")
    async with core(settings) as (survivor, backend):
        await ask(survivor, "four")
        kept = await turns(survivor)
    assert [turn.status for turn in kept] == ["cancelled"] * 3 + ["completed"]
    assert {turn.error["code"] for turn in kept if turn.error} == {"interrupted"}
    assert [words(path) for path in backend.seen] == [["four"]]


async def test_an_answer_that_a_dead_proxy_was_delivering_is_uncertain_and_stays_on_the_path(
    settings: Settings,
) -> None:
    engine = Engine(settings, backend=MemoryBackend())
    await engine.start()
    answer = await engine.submit(request("one"))
    await answer.turn()
    engine._instances.leave(settled=False)
    engine.kill()
    async with core(settings) as (survivor, _):

        async def uncertain() -> bool:
            return (await turns(survivor))[0].delivery == "uncertain"

        await until(uncertain)
        second = await ask(survivor, "two")
        assert second.parent_id == answer.turn_id


async def test_a_living_proxys_turns_stay_its_own(settings: Settings) -> None:
    model = Model()
    model.open.clear()
    async with core(settings, model) as (one, _):
        answer = await one.submit(request("one"))
        await model.reached.wait()
        async with core(settings) as (two, _):
            await ask(two, "elsewhere", agent="b")
            assert [turn.status for turn in await turns(two)] == ["running"]
        model.open.set()
        await answer.turn()
        answer.acknowledge()
