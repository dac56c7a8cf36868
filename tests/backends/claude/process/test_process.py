"""One process: its turns, its misbehaviours, its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from cli_session_proxy import redact
from cli_session_proxy.backends.base import Activity
from cli_session_proxy.backends.claude.process import child, frames
from cli_session_proxy.backends.claude.process.capability import probe
from cli_session_proxy.backends.claude.process.child import write_prompt
from cli_session_proxy.backends.claude.process.events import CallRefused, ProcessDied, Result
from cli_session_proxy.backends.claude.process.guardian import Guardian
from cli_session_proxy.backends.claude.process.process import ClaudeProcess
from cli_session_proxy.domain.client_tools import Offers
from cli_session_proxy.domain.models import Tool
from cli_session_proxy.errors import ClaudeUnavailable, SandboxError
from cli_session_proxy.settings import Profile, Settings

from ....until import until
from ....wrappers import wrapped
from .acting import launch
from .conftest import Fake, Start
from .helpers import ask, free_descriptors, group, is_gone, result, said


async def test_a_warm_process_takes_turn_after_turn(fake: Fake, start: Start) -> None:
    process = await start(await fake())
    for prompt in ("one", "four"):
        assert said(await ask(process, prompt)) == f"{len(prompt)} {prompt}"
        assert process.usable
    assert process.start_time is not None


async def test_it_is_free_as_soon_as_the_result_is_out(fake: Fake, start: Start) -> None:
    process = await start(await fake())
    events = process.turn("11111111-1111-4111-8111-111111111111", [{"type": "text", "text": "x"}])
    async for event in events:
        if isinstance(event, Result):
            break
    assert process.usable
    assert said(await ask(process, "again")) == "5 again"
    await events.aclose()
    assert process.usable


async def test_noise_on_stdout_is_tolerated_and_seen(fake: Fake, start: Start) -> None:
    events = await ask(await start(await fake("noise")), "hi")
    assert events.count(Activity("garbage")) == 4
    assert said(events) == "2 hi"


async def test_a_result_of_another_frame_does_not_end_the_turn(fake: Fake, start: Start) -> None:
    assert result(await ask(await start(await fake("other-result")), "hi")).text == "2 hi"


async def test_an_answer_to_what_the_cli_has_prompted_itself_is_not_the_clients(fake: Fake, start: Start) -> None:
    """Tools of CLI 2.1.332 do so (Monitor, CronCreate, ScheduleWakeup). It names no prompt of ours there."""
    process = await start(replace(await fake("own-turn"), profile=Profile(confined=True)))
    assert said(await ask(process, "hi")) == "2 hi"
    events = await ask(process, "hello")
    assert (said(events), result(events).text) == ("5 hello", "5 hello")
    assert [event.call for event in events if isinstance(event, CallRefused)] == ["t0"]
    assert process.told is not None
    assert [message["content"][0]["text"] for message in process.told] == ["5 hello"]


async def test_an_answer_that_comes_while_the_clients_prompt_is_queued_is_not_its_answer(
    fake: Fake, start: Start
) -> None:
    """A hook of SessionStart with `asyncRewake` does so (2.1.332): the client's words got the answer to the hook's."""
    events = await ask(await start(await fake("queued")), "hi")
    assert (said(events), result(events).text) == ("2 hi", "2 hi")


async def test_an_end_without_a_result_is_told_with_its_exit_code(fake: Fake, start: Start) -> None:
    process = await start(await fake("no-result"))
    with pytest.raises(ProcessDied) as died:
        await ask(process)
    assert died.value.returncode == 0
    assert not process.usable


async def test_an_unknown_session_is_recognised(fake: Fake, start: Start) -> None:
    process = await start(await fake("forget"))
    with pytest.raises(ProcessDied) as died:
        await ask(process)
    assert died.value.no_conversation


@pytest.mark.parametrize(("mode", "why"), [("forget", "No conversation found"), ("crash", "exit code 1")])
async def test_one_that_ended_before_the_turn_tells_why(mode: str, why: str, fake: Fake, start: Start) -> None:
    process = await start(await fake(mode))
    await until(lambda: not process.alive)
    with pytest.raises(ProcessDied) as died:
        await ask(process)
    assert why in died.value.why
    assert died.value.returncode == 1
    assert died.value.no_conversation == (mode == "forget")


async def test_a_line_of_3_mb_is_one_answer(fake: Fake, start: Start) -> None:
    process = await start(await fake("huge", env={"FAKE_SIZE": str(3 * 1024 * 1024)}))
    assert len(said(await ask(process))) == 3 * 1024 * 1024


async def test_a_line_of_70_mb_ends_the_process_not_the_proxy(fake: Fake, start: Start) -> None:
    process = await start(await fake("huge", env={"FAKE_SIZE": str(70 * 1024 * 1024)}))
    with pytest.raises(ProcessDied, match="a line of more than"):
        await ask(process)
    await process.close()
    assert is_gone(process.pid)


async def test_a_prompt_beyond_the_pipe_is_written_while_output_is_read(fake: Fake, start: Start) -> None:
    assert said(await ask(await start(await fake()), "p" * 2_000_000)).startswith("2000000 ")


def test_a_frame_goes_over_in_one_piece_where_the_system_gives_a_socket_8_kb(monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS does."""
    pair = socket.socketpair()
    for one in pair:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    monkeypatch.setattr(socket, "socketpair", lambda: pair)
    ours, theirs = child._input_pair()
    with ours, theirs:
        ours.setblocking(False)
        assert ours.send(bytes(100_000)) == 100_000
        assert len(theirs.recv(100_000, socket.MSG_WAITALL)) == 100_000


async def test_a_flooded_stderr_blocks_nothing_and_keeps_its_tail(fake: Fake, start: Start) -> None:
    process = await start(await fake("flood"))
    assert said(await ask(process)) == "2 hi"
    await process.close()
    assert process.stderr.endswith("the last words")
    assert len(process.stderr) <= 16 * 1024


@pytest.mark.parametrize("mode", ["deaf", "stubborn", "orphan", "silent"])
async def test_close_ends_whatever_it_is_and_its_children(mode: str, fake: Fake, start: Start) -> None:
    process = await start(await fake(mode))
    if mode in ("stubborn", "orphan"):
        await ask(process)
    async with asyncio.timeout(60):
        await process.close()
        await process.close()
    assert is_gone(process.pid)
    assert group(process.pid) == []


async def test_the_end_of_a_cli_behind_a_script_is_over_when_the_cli_itself_is_dead(
    fake: Fake, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = await fake("stubborn")
    script = wrapped(launch.capability.path, tmp_path / "bin", "no exec")
    process = await start(replace(launch, capability=replace(launch.capability, path=script)))
    await ask(process)
    alive = True
    monkeypatch.setattr(child, "_exists", lambda _group: alive)
    monkeypatch.setattr(child, "_members", lambda _group: alive)
    closing = asyncio.create_task(process.close())
    await until(lambda: process.returncode is not None)  # of the script
    for _ in range(20):
        await asyncio.sleep(0)
    assert not closing.done()
    alive = False
    await closing
    assert group(process.pid) == []


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("no new thread")])
@pytest.mark.parametrize("what", ["_members", "sweep"])
async def test_where_nobody_can_look_for_what_a_cli_left_it_is_looked_again_once_its_own_descriptors_are_free(
    what: str, error: Exception, fake: Fake, start: Start, guardian: Guardian, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await start(await fake(profile=Profile(tools=("Bash",))))
    await ask(process)
    open_, looked = psutil.Process().num_fds(), list[int]()

    def look(*_: object) -> list[int]:
        looked.append(psutil.Process().num_fds())
        if len(looked) == 1:
            raise error
        return []

    monkeypatch.setattr(child, "_exists", lambda _group: True)
    monkeypatch.setattr(child, what, look)
    await process.close()
    assert looked[1] < open_
    assert process.pid not in guardian._guarded


@pytest.mark.parametrize("what", ["_members", "sweep"])
async def test_where_nobody_can_ever_look_all_is_released_and_what_may_be_left_stays_guarded(
    what: str, fake: Fake, settings: Settings, guardian: Guardian, monkeypatch: pytest.MonkeyPatch
) -> None:
    await guardian.start()
    launch = await fake(profile=Profile(tools=("Bash",)))
    before = psutil.Process().num_fds()
    process = await ClaudeProcess.spawn(launch, settings, guardian)
    await ask(process)

    def look(*_: object) -> None:
        monkeypatch.setattr(child, "KILL_WAIT", 0.0)  # it is over now
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(child, "_exists", lambda _group: what == "_members")
    monkeypatch.setattr(child, what, look)
    unseen = pytest.raises(ClaudeUnavailable, match="cannot be seen to be dead")
    with unseen if what == "_members" else contextlib.nullcontext():
        await process.close()
    await until(lambda: psutil.Process().num_fds() == before)
    assert is_gone(process.pid)
    assert process.pid in guardian._guarded


async def test_a_deaf_cli_with_a_large_prompt_can_still_be_closed(fake: Fake, start: Start) -> None:
    process = await start(await fake("deaf"))
    turn = asyncio.create_task(ask(process, "p" * 2_000_000))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(turn, 0.3)
    assert not process.usable
    async with asyncio.timeout(60):
        await process.close()
    assert is_gone(process.pid)


async def test_close_during_a_turn_tells_who_waits_for_it(fake: Fake, start: Start) -> None:
    process = await start(await fake("silent"))
    turn = asyncio.create_task(ask(process))
    await until(lambda: process.busy)
    await process.close()
    with pytest.raises(ProcessDied):
        await turn


async def test_close_is_not_cut_short_by_a_cancellation(fake: Fake, start: Start) -> None:
    process = await start(await fake("stubborn"))
    await ask(process)
    closing = asyncio.create_task(process.close())
    await asyncio.sleep(0)
    closing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await closing
    assert closing.cancelled()
    assert is_gone(process.pid)


async def test_a_turn_left_half_way_spoils_the_process(fake: Fake, start: Start, tmp_path: Path) -> None:
    process = await start(await fake("gate", env={"FAKE_GATE": str(tmp_path / "open")}))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ask(process, "first"), 0.3)
    (tmp_path / "open").touch()
    assert not process.usable
    with pytest.raises(ProcessDied):  # never the first one's answer
        await ask(process, "second")


async def test_one_that_answers_before_it_has_read_the_prompt_is_not_used_again(fake: Fake, start: Start) -> None:
    process = await start(await fake("hasty"))
    assert result(await ask(process, "p" * 2_000_000)).text == "yes"
    assert process.alive
    assert not process.usable


async def test_one_that_asks_and_reads_no_answer_is_killed_before_the_answers_fill_the_memory(
    fake: Fake, start: Start, settings: Settings
) -> None:
    settings.max_body = 1_000_000
    process = await start(await fake("asking", env={"FAKE_SIZE": "30"}))
    async with asyncio.timeout(60):
        with pytest.raises(ProcessDied, match="-9"):
            await ask(process, "x")


async def test_what_it_is_answered_counts_as_well(fake: Fake, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell in its place can ask for a list of large tools again and again, and read it: each is written anew."""
    monkeypatch.setattr(frames, "MOST_OF_A_TURN", 5_000_000)
    process = await start(await fake("asking", env={"FAKE_SIZE": "30"}))
    async with asyncio.timeout(60):
        with pytest.raises(ProcessDied, match="in one turn"):
            await ask(process, "x")
    await process.close()
    assert process._reader is None  # it has what was heard, and the process may be kept with the error


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_one_that_has_closed_its_stdin_is_still_heard(
    new_loop: Callable[[], asyncio.AbstractEventLoop], fake: Fake, settings: Settings
) -> None:
    async def run() -> str:
        guardian = Guardian()
        try:
            process = await ClaudeProcess.spawn(await fake("closed", env={"FAKE_SIZE": "30"}), settings, guardian)
            try:
                return result(await ask(process)).text
            finally:
                await process.close()
        finally:
            await guardian.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(run()) == "yes"


async def test_one_that_was_left_while_it_was_offered_tools_is_not_used_again(fake: Fake, start: Start) -> None:
    process = await start(await fake())
    offers = Offers.of((Tool("weather"),))
    offering = asyncio.create_task(process.adapt(replace(process.launch, offers=offers)))
    await until(lambda: bool(process._tools.offers) and not process.busy)  # taken, and not read yet
    offering.cancel()
    await asyncio.wait([offering])
    assert offering.cancelled()
    assert not process.usable


async def test_what_it_knows_is_asked_again_only_when_it_is_another_version(fake: Fake, start: Start) -> None:
    async def known(version: str) -> bool:
        """Whether a turn of a CLI that says that it is this one leaves what was known of it."""
        launch = await fake(env={"FAKE_VERSION": version})
        await ask(await start(launch))
        return await probe(launch.capability.path, dict(launch.env)) is launch.capability

    assert await known("2.9.9")
    assert not await known("2.9.8")


async def test_another_system_prompt_is_given_to_a_running_process_only_where_that_works(
    fake: Fake, start: Start
) -> None:
    old = await fake(system_prompt="One.")
    able = replace(old.capability, flags=old.capability.flags | {"--system-prompt-snapshot"})
    for began, prompt, taken in (
        (replace(old, capability=able), "Two.", True),
        (old, "One.", True),
        (old, "Two.", False),
        (replace(old, capability=able), None, False),
        (replace(old, capability=able, system_prompt=" "), "Two.", False),
    ):
        process = await start(began)
        await ask(process)  # it has said which model it asks
        assert await process.adapt(replace(began, system_prompt=prompt)) is taken
        assert process.usable


@pytest.mark.parametrize(
    ("mode", "why"), [("silent", "it said nothing for"), ("no-end", "after the model had answered")]
)
async def test_what_has_to_come_soon_is_not_waited_for_long(
    fake: Fake, start: Start, monkeypatch: pytest.MonkeyPatch, mode: str, why: str
) -> None:
    monkeypatch.setattr("cli_session_proxy.backends.claude.process.process.SILENCE", 0.4)
    process = await start(await fake(mode))
    with pytest.raises(ProcessDied, match=why) as died:
        await ask(process, "hi")
    assert not died.value.retry
    assert str(process.launch.capability.path) in died.value.cli


async def test_unknown_frames_between_the_answer_and_its_result_leave_no_timer_behind(
    fake: Fake, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end the process in the middle of a later turn."""
    loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
    call_later = loop.call_later

    def noted(delay: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        timer = call_later(delay, callback, *args)
        if getattr(callback, "__name__", "") == "_ring":
            timers.append(timer)
        return timer

    monkeypatch.setattr(loop, "call_later", noted)
    process = await start(await fake("postscript"))
    assert not result(await ask(process, "hi")).is_error
    assert len(timers) > 1  # for the first word, and for the result
    assert all(timer.cancelled() for timer in timers)


@pytest.mark.parametrize("confined", [False, True])
@pytest.mark.sample(1)
async def test_one_that_is_at_work_is_waited_for_on_a_busy_machine(
    fake: Fake, start: Start, monkeypatch: pytest.MonkeyPatch, confined: bool
) -> None:
    monkeypatch.setattr("cli_session_proxy.backends.claude.process.process.SILENCE", 1.6)
    process = await start(await fake("slow", **(behind_another() if confined else {})))
    assert not result(await ask(process, "hi")).is_error


async def test_one_that_waits_for_a_processor_is_waited_for(
    fake: Fake, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with a hundred more that are ready to run, it used too little of one to count as at work."""
    monkeypatch.setattr("cli_session_proxy.backends.claude.process.process.SILENCE", 1.6)
    process = await start(await fake("slow"))
    monkeypatch.setattr(psutil.Process, "cpu_times", lambda _: (0.0, 0.0))
    monkeypatch.setattr(child, "waited_for_processor", lambda _: time.monotonic())
    assert not result(await ask(process, "hi")).is_error


@pytest.mark.skipif(sys.platform != "linux", reason="another kernel does not say")
async def test_how_long_a_program_waited_for_a_processor_is_known() -> None:
    busy = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(flush=True)\nwhile True: pass"
    pipe = asyncio.subprocess.PIPE
    both = [await asyncio.create_subprocess_exec(sys.executable, "-c", busy, stdout=pipe) for _ in range(2)]
    try:
        for one in both:
            assert one.stdout is not None
            await one.stdout.readline()
        await until(lambda: all(child.waited_for_processor(one.pid) > 0.1 for one in both))
    finally:
        for one in both:
            one.kill()
            await one.wait()
    assert child.waited_for_processor(both[0].pid) == 0.0


async def test_a_confined_one_without_tools_is_not_waited_for_longer(
    fake: Fake, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli_session_proxy.backends.claude.process.process.SILENCE", 0.4)
    process = await start(await fake("silent", **behind_another()))
    with pytest.raises(ProcessDied, match="it said nothing for"):
        await asyncio.wait_for(ask(process, "hi"), 60)


def behind_another() -> dict[str, Any]:
    """Of a confined launch: the CLI is a child of the process that was started, which waits, as bubblewrap does."""

    async def wrapper() -> tuple[str, ...]:
        return ("sh", "-c", '"$@"; exit $?', "sh")

    return {"wrapper": wrapper, "profile": Profile(confined=True)}


async def test_a_control_request_that_is_not_answered_says_so_and_is_not_tried_again(
    fake: Fake, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli_session_proxy.backends.claude.process.process.ANSWER_WAIT", 0.3)
    process = await start(await fake("deaf"))
    with pytest.raises(ProcessDied, match=r"did not answer the control request `apply_flag_settings` in 0\.3 s"):
        await process.set_env({"A": "b"})
    known = await probe(process.launch.capability.path, dict(process.launch.env))
    assert not known.takes_parameters


async def test_of_a_long_refusal_its_beginning_is_looked_at(
    fake: Fake, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look for secrets in 16 MB held everybody up for 46 s."""
    looked: list[int] = []
    text = redact.text

    def look(value: str) -> str:
        looked.append(len(value))
        return text(value)

    monkeypatch.setattr(redact, "text", look)
    assert not await (await start(await fake("refuses"))).set_env({"A": "b"})
    assert max(looked) < 20_000


async def test_a_turn_that_no_interrupt_ends_is_ended_by_its_process(
    fake: Fake, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli_session_proxy.backends.claude.process.process.INTERRUPT_WAIT", 0.3)
    process = await start(await fake("stubborn-turn"))
    turn = asyncio.create_task(ask(process, "hi"))
    await until(lambda: process.busy)
    await process.interrupt()
    with pytest.raises(ProcessDied, match="did not end a turn"):
        await turn
    known = await probe(process.launch.capability.path, dict(process.launch.env))
    assert not known.does("interrupt")


async def test_a_session_that_was_not_written_is_told(
    fake: Fake, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    process = await start(await fake("full-disk"))
    await ask(process, "hi")
    await process.close()
    assert process.writes_lost == "ENOSPC"


async def test_an_interrupt_ends_the_turn_with_its_result(fake: Fake, start: Start) -> None:
    process = await start(await fake("silent"))
    turn = asyncio.create_task(ask(process))
    await until(lambda: process.busy)
    await process.interrupt()
    end = result(await turn)
    assert end.terminal_reason == "aborted_streaming"
    assert process.usable


async def test_one_that_dies_while_idle_is_not_usable(fake: Fake, start: Start) -> None:
    process = await start(await fake())
    await ask(process)
    os.kill(process.pid, signal.SIGKILL)
    await until(lambda: not process.usable)
    with pytest.raises(ProcessDied):
        await ask(process)


async def test_tools_that_nobody_allowed_end_it_before_the_model_is_asked(fake: Fake, start: Start) -> None:
    process = await start(await fake("tools"))
    with pytest.raises(ClaudeUnavailable, match="Bash"):
        await ask(process)
    assert not process.usable


async def test_a_cold_cli_gets_one_turn_and_then_ends_by_itself(fake: Fake, start: Start) -> None:
    launch = await fake()
    old = type(launch.capability)(launch.capability.path, "1.0.120", (1, 0, 120), frozenset(), frozenset())
    process = await start(
        type(launch)(old, launch.cwd, launch.session_id, False, "default", launch.profile, launch.env)
    )
    assert said(await ask(process, "@x y")) == "4 @x y"
    assert not process.usable
    await process.close()
    assert process.returncode == 0


async def test_a_missing_directory_or_program_is_named(
    fake: Fake, settings: Settings, guardian: Guardian, tmp_path: Path
) -> None:
    with pytest.raises(SandboxError):
        await ClaudeProcess.spawn(await fake(cwd=tmp_path / "nowhere"), settings, guardian)
    launch = await fake()
    launch.capability.path.unlink()
    with pytest.raises(ClaudeUnavailable):
        await ClaudeProcess.spawn(launch, settings, guardian)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_however_few_descriptors_are_free_a_start_says_so_and_leaves_nothing_open(
    run: Callable[..., None], fake: Fake, settings: Settings, tmp_path: Path
) -> None:
    async def main() -> None:
        guardian, refused = Guardian(), list[str]()
        await guardian.start()
        launch = await fake(system_prompt="Be terse.", env={"TMPDIR": str(tmp_path)})
        before = psutil.Process().num_fds()
        for number in range(24):
            with free_descriptors(number):
                try:
                    process = await ClaudeProcess.spawn(launch, settings, guardian)
                except ClaudeUnavailable as exc:
                    refused.append(exc.message)
                else:
                    await process.close()
                    assert is_gone(process.pid)
            await until(lambda: psutil.Process().num_fds() == before)
            assert not [name for name in os.listdir(tmp_path) if name.startswith("system-prompt-")]
        assert 0 < len(refused) < 24
        assert all("raise the limit of open files" in why for why in refused)
        assert guardian._guarded == {}
        await guardian.close()

    run(main())


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("no new thread")])
async def test_one_that_was_started_and_cannot_be_guarded_is_ended(
    error: Exception, fake: Fake, settings: Settings, guardian: Guardian, monkeypatch: pytest.MonkeyPatch
) -> None:
    await guardian.start()
    launch, pids = await fake("stubborn"), list[int]()

    def start_time(pid: int) -> str:
        pids.append(pid)
        raise error

    monkeypatch.setattr(child, "start_time", start_time)
    with pytest.raises(ClaudeUnavailable, match="raise the limit of"):
        await ClaudeProcess.spawn(launch, settings, guardian)
    await until(lambda: is_gone(pids[0]))


@pytest.mark.parametrize("there", ["a directory", "a link", "no folder"])
async def test_a_prompt_file_that_cannot_be_removed_keeps_no_process_from_being_closed(
    there: str, fake: Fake, start: Start, tmp_path: Path
) -> None:
    folder, other = tmp_path / "t", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    launch = await fake(system_prompt="Be terse.", env={"TMPDIR": str(folder)})
    process = await start(launch)
    (file,) = folder.glob("system-prompt-*")
    file.unlink()
    if there == "a directory":
        file.mkdir()
    if there == "a link":
        file.symlink_to(other)
    if there == "no folder":
        folder.rmdir()
        folder.touch()
    await process.close()
    assert is_gone(process.pid)
    assert other.is_dir()


def test_a_system_prompt_for_which_there_is_no_room_leaves_nothing_behind(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(SandboxError, match="not full"):
            write_prompt(launch(system_prompt="x" * 1000, env=(("TMPDIR", str(tmp_path)),)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.glob("system-prompt-*")) == []
