"""Rows about session files and directories."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from turnfault import files

from ..until import until
from .row import NEW, Breaks, Row, Says
from .talk import EngineTalk, Talk, by_hand

LONG_AGO = 100 * 86400  # seconds; a CLI's own clean-up takes what is older than 30 days


def _cold(breaks: Callable[[Talk], None]) -> Breaks:
    async def run(talk: Talk) -> None:
        await talk.down()
        breaks(talk)
        await talk.up()

    return run


def _warm(breaks: Callable[[Talk], None]) -> Breaks:
    async def run(talk: Talk) -> None:
        breaks(talk)

    return run


def _file(how: Callable[[Path], None]) -> Callable[[Talk], None]:
    return lambda talk: how(talk.transcript)


delete = _file(files.delete)
remove_a_middle_line = _file(files.remove_a_middle_line)
break_a_parent = _file(files.break_a_parent)
cut_the_last_line = _file(files.cut_the_last_line)
empty = _file(files.empty)
append_garbage = _file(files.append_garbage)


def swap_for_another(talk: Talk) -> None:
    """Another conversation under this session's name."""
    other = "".join(files.lines(talk.transcript)).replace("fact-", "fact-9").replace(talk.session_id, talk.session_id)
    other = re.sub(r'"(uuid|parentUuid)":"([0-9a-f]{8})', lambda found: f'"{found[1]}":"{found[2][::-1]}', other)
    talk.transcript.write_text(other, encoding="utf-8")


def wipe_projects(talk: Talk) -> None:
    shutil.rmtree(talk.projects)


def make_unreadable(talk: Talk) -> None:
    """A folder in its place: the tests may run as root, whom no file mode stops."""
    talk.transcript.unlink()
    talk.transcript.mkdir()
    (talk.transcript / "in-the-way").touch()


def make_dangling(talk: Talk) -> None:
    talk.transcript.unlink()
    talk.transcript.symlink_to(talk.settings.var / "nowhere")


async def let_it_age(talk: Talk) -> None:
    """Too old for the CLI's own clean-up, which any CLI that shares the folder does at its start."""
    await talk.down()
    long_ago = time.time() - LONG_AGO
    for path in talk.projects.rglob("*"):
        os.utime(path, (long_ago, long_ago))
    elsewhere = talk.settings.var / "elsewhere"
    elsewhere.mkdir()
    async with by_hand(talk, cwd=elsewhere) as hand:
        hand.type("hello")
        await until(lambda: not talk.transcript.exists())
    await talk.up()


# --- directories


async def move_var(talk: Talk) -> None:
    await talk.down()
    moved = talk.settings.var.with_name("var-moved")
    talk.settings.var.rename(moved)
    await talk.up(var=moved)


async def reach_through_a_link(talk: Talk) -> None:
    await talk.down()
    link = talk.settings.var.with_name("var-link")
    link.symlink_to(talk.settings.var)
    await talk.up(var=link)


async def move_and_link(talk: Talk) -> None:
    """The directory moved to another disk, and a link put in its place."""
    await talk.down()
    moved = talk.settings.var.with_name("other-disk")
    talk.settings.var.rename(moved)
    talk.settings.var.symlink_to(moved)
    await talk.up()


def _into(talk: Talk, cwd: Path) -> None:
    slug = talk.projects / re.sub(r"[^a-zA-Z0-9]", "-", os.path.realpath(cwd))
    slug.mkdir(exist_ok=True)
    talk.transcript.rename(slug / talk.transcript.name)


def put_under_a_doubled_prefix(talk: Talk) -> None:
    _into(talk, talk.cwd.parent / "agents" / talk.cwd.name)


def put_under_another_cwd(talk: Talk) -> None:
    _into(talk, talk.settings.var / "another")


async def lose_the_sandbox(talk: Talk) -> None:
    await talk.down()
    shutil.rmtree(talk.cwd)
    if not isinstance(talk, EngineTalk):
        talk.cwd.mkdir()
    await talk.up()


FILES = "session files"
WHERE = "directories"


def _changed(how: str) -> Says:
    return {
        4: rf"\*\*repaired\*\* .*The session's transcript differed from the chain \({how}\): it was written again "
        r"from the chain \(\d+ lines\); the old file is kept at \S+/salvage/\S+\.jsonl\."
    }


def _moved(where: str) -> Says:
    return {
        4: r"\*\*repaired\*\* .*The session's transcript was not where the CLI looks \(\S+\.jsonl\): it was found at "
        rf"\S+{where}/\S+\.jsonl and moved back\."
    }


_GONE = {
    4: r"\*\*repaired\*\* .*The session's transcript was gone \(no transcript at \S+\.jsonl\): it was written again "
    r"from the chain \(\d+ lines\)\."
}
_SHORTER = r"\d+ records instead of \d+"
_OTHER = r"record \d+ of \d+ is not the chain's"
ROWS = (
    Row(FILES, "transcript deleted between turns", _cold(delete), quick=NEW, continuity="rebuilt", says=_GONE),
    Row(FILES, "transcript deleted under a warm process", _warm(delete), quick=NEW, continuity="rebuilt",
        says=_GONE),
    Row(FILES, "a middle line removed", _cold(remove_a_middle_line), continuity="rebuilt",
        says=_changed(_SHORTER)),
    Row(FILES, "a middle line removed under a warm process", _warm(remove_a_middle_line), continuity="rebuilt",
        says=_changed(_SHORTER)),
    Row(FILES, "parentUuid broken", _cold(break_a_parent), quick=NEW, continuity="rebuilt",
        says=_changed(_OTHER)),
    Row(FILES, "last line cut", _cold(cut_the_last_line), continuity="rebuilt",
        says=_changed(rf"{_SHORTER}, and 1 broken")),
    Row(FILES, "half a line of something else at the end", _cold(append_garbage), continuity="rebuilt",
        says={4: r"The session's transcript ended with a broken line: it was written again from the chain \("}),
    Row(FILES, "file emptied", _cold(empty), continuity="rebuilt", says=_changed("the file is empty")),
    Row(FILES, "replaced by another session's", _cold(swap_for_another), quick=NEW, continuity="rebuilt",
        says=_changed(_OTHER)),
    Row(FILES, "replaced under a warm process", _warm(swap_for_another), continuity="rebuilt",
        says=_changed(_OTHER)),
    Row(FILES, "whole `projects/` wiped", _cold(wipe_projects), continuity="rebuilt", says=_GONE),
    Row(FILES, "whole `projects/` wiped under a warm process", _warm(wipe_projects), continuity="rebuilt",
        says=_GONE),
    Row(FILES, "older than the clean-up period", let_it_age, continuity="rebuilt", says=_GONE),
    Row(FILES, "unreadable: a folder in its place", _cold(make_unreadable), quick=NEW, continuity="rebuilt",
        says={4: r"transcript could not be read \(\S+\.jsonl: Is a directory\): it was written again .* kept at \S+"}),
    Row(FILES, "a dangling link in its place", _cold(make_dangling), continuity="rebuilt",
        says={4: r"could not be read \(\S+\.jsonl: it is a link, no regular file\): it was written again"}),
    Row(WHERE, "`var/` moved while stopped", move_var, quick=NEW, continuity="resumed", link="moved",
        says=_moved("-var-sandbox-agents-a")),
    Row(WHERE, "`var/` reached through a symlink", reach_through_a_link, continuity="resumed"),
    Row(WHERE, "`var/` moved, a symlink in its place", move_and_link, continuity="resumed", link="moved",
        says=_moved("-var-sandbox-agents-a")),
    Row(WHERE, "transcript under a doubled `agents/agents`", _cold(put_under_a_doubled_prefix), quick=NEW,
        continuity="resumed", link="moved", says=_moved("-agents-agents-a")),
    Row(WHERE, "transcript under another cwd's folder", _cold(put_under_another_cwd), continuity="resumed",
        link="moved", says=_moved("-var-another")),
    Row(WHERE, "the same under a warm process", _warm(put_under_another_cwd), clis=NEW, continuity="resumed",
        link="moved", says=_moved("-var-another")),
    Row(WHERE, "the sandbox deleted", lose_the_sandbox, continuity="resumed",
        says={4: r"sandbox directory was missing \(nothing at \S+/agents/a\): an empty one was made\."}),
)  # fmt: skip
