"""The guardian: a small program beside each proxy. When the proxy dies, it kills the CLIs that the proxy left.

    python -I -S guardian_program.py MARK DIRECTORY

Its stdin is a unix socket whose other end only the proxy has. The proxy sends a `RECORD` for each CLI: `+` before its
first input, and `-` after it was reaped; and `.` when the proxy ends without any CLI left. At end of file without `.`
the proxy has died, and the guardian

- stops every registered process group, collects all descendants, and sends SIGKILL to both: on macOS the environment of
system programs (a shell, git) is hidden, so they cannot be found by MARK,
- sends SIGKILL to every process with MARK in its environment: some have left their group (the CLI's Bash tool starts
shells in sessions of their own), or were never registered (the proxy died just after their start),
- and ends.

With `+` comes a copy of the proxy's end of the CLI's stdin. While the guardian has it, the CLI does not see the end of
its input. Otherwise a CLI that waits for tool results would write "interrupted" results and ask the model again (28 ms
after the proxy's death on 2.1.330), before it is killed.

Only the standard library is imported at the start, which takes 15 ms; DIRECTORY is where psutil is found later. The
proxy itself uses `status` and `sweep` as well.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import psutil

# A record: `+`, `-` or `.`, the process group's id, its leader's start time (clock ticks; 0: unknown).
RECORD = struct.Struct("!cqq")
GUARD = b"+"
RELEASE = b"-"
NONE_LEFT = b"."
# The variable with the mark in each CLI's environment, which identifies its descendants. The leading underscore
# distinguishes it from settings of the proxy.
MARK_VARIABLE = "_CLI_SESSION_PROXY_PROCESS"
# Bytes of an environment that are read. A CLI's mark is its first variable, and what it starts usually gets the same
# order. A program can pretend to have an endless environment (`PR_SET_MM_MAP`), and a thousand with a megabyte each
# take 5 s.
LONGEST_ENVIRONMENT = 128 * 1024
# How often we search, because a process may start another one meanwhile; seconds for a killed process to die.
SWEEPS = 20
SWEEP_WAIT = 0.5
# Seconds of the search for a process that was being started when the proxy died: until its `exec` it has the proxy's
# environment. And seconds between two searches.
BEING_STARTED = 1.0
LOOK = 0.25

_STARTTIME = 22  # proc_pid_stat(5): clock ticks after boot


def status(pid: int) -> tuple[str, int] | None:
    """State and start time of a process (Linux only); None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field, the program's name, may be any bytes; the third follows the last ")".
    fields = stat.rpartition(b")")[2].decode("ascii").split()
    return fields[0], int(fields[_STARTTIME - 3])


def mark_of(process: psutil.Process) -> str:
    """The mark in its environment; empty if there is none or it is unreadable.

    Not read inside a sandbox: whoever reads it waits for the process's own changes to its memory (mprotect), and a
    program can make these last for minutes. The first process there is bubblewrap's.
    """
    if sys.platform != "linux":
        import psutil  # noqa: PLC0415 - as below

        with contextlib.suppress(psutil.Error):
            return process.environ().get(MARK_VARIABLE, "")
        return ""
    try:
        with open(f"/proc/{process.pid}/status", "rb") as file:
            pids = file.read().partition(b"\nNSpid:")[2].partition(b"\n")[0].split()
        if len(pids) > 1 and pids[-1] != b"1":  # in a namespace of processes: all end with its first one
            return ""
        with open(f"/proc/{process.pid}/environ", "rb") as file:
            environment = b"\0" + file.read(LONGEST_ENVIRONMENT)
    except OSError:  # it has ended, or is another user's
        return ""
    return environment.partition(f"\0{MARK_VARIABLE}=".encode())[2].partition(b"\0")[0].decode(errors="replace")


def sweep(mark: str) -> None:
    """Kill every process whose mark begins with `mark`, until there is none."""
    import psutil  # noqa: PLC0415 - the guardian needs it once, at its end

    for _ in range(SWEEPS):
        found = [process for process in psutil.process_iter() if mark_of(process).startswith(mark)]
        if not found:
            return
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=SWEEP_WAIT)


def started_by(group: int) -> list[psutil.Process]:
    """The descendants of a process group's members, in whatever group or session they are."""
    import psutil  # noqa: PLC0415 - as above

    children: dict[int, list[psutil.Process]] = {}
    family = []
    for process in psutil.process_iter(["ppid"]):
        children.setdefault(process.info["ppid"], []).append(process)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == group:
                family.append(process)
    members, found = {process.pid for process in family}, []
    while family:
        for child in children.pop(family.pop().pid, ()):
            family.append(child)
            if child.pid not in members:
                found.append(child)
    return found


def stopped(group: int) -> list[psutil.Process]:
    """Stop a process group and its descendants, again and again until there are no new ones. Returns the
    descendants."""
    import psutil  # noqa: PLC0415 - as above

    stop(group)
    found: dict[int, psutil.Process] = {}
    for _ in range(SWEEPS):
        new = [process for process in started_by(group) if process.pid not in found]
        if not new:
            break
        for process in new:
            found[process.pid] = process
            with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
                process.suspend()
    return list(found.values())


def stop(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGSTOP)


def kill(group: int, started: list[psutil.Process]) -> None:
    """Kill a process group and these descendants."""
    import psutil  # noqa: PLC0415 - as above

    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    for process in started:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _watch(line: socket.socket) -> dict[int, int] | None:
    """Wait for the proxy's end. Returns the registered groups with their leaders' start times; None after `.`."""
    groups: dict[int, int] = {}
    inputs: dict[int, list[int]] = {}
    while True:
        record, descriptors, _, _ = socket.recv_fds(line, RECORD.size, 1)
        while record and len(record) < RECORD.size and (rest := line.recv(RECORD.size - len(record))):
            record += rest
        if len(record) < RECORD.size:
            return groups
        operation, group, started = RECORD.unpack(record)
        if operation == NONE_LEFT:
            return None
        for old in inputs.pop(group, []):
            os.close(old)
        groups.pop(group, None)
        if operation == GUARD:
            groups[group], inputs[group] = started, descriptors


def main() -> None:
    mark, directory = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # signals to the proxy may reach us, too
        signal.signal(number, signal.SIG_IGN)
    groups = _watch(socket.socket(fileno=sys.stdin.fileno()))
    if groups is None:
        return
    left = []
    for group, started in groups.items():
        now = status(group) if started else None
        if now is not None and now[1] != started:
            continue  # the pid was reused: the whole group is dead
        stop(group)
        left.append(group)
    sys.path.append(directory)
    for group in left:
        kill(group, stopped(group))
    until = time.monotonic() + BEING_STARTED
    while True:
        sweep(mark)
        if time.monotonic() > until:
            return
        time.sleep(LOOK)


if __name__ == "__main__":
    main()
