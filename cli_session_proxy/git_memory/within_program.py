"""Run a command with restricted file access: `python -I -S within_program.py BYTES PLACE … -- COMMAND …`.

Each PLACE is RIGHTS:DEVICE:INODE:PATH, with rights of `rwx`; inode 0 matches any. Landlock (Linux 5.13) forbids the
command to read, create, change or run anything else, wherever links lead: an agent that writes in the repository can
create a link, a path or a hook while git runs. BYTES limits the command's memory. Without Landlock or a PLACE only that
limit holds.

Only the standard library is imported.
"""

from __future__ import annotations

import ctypes
import os
import resource
import stat
import struct
import sys

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # on every architecture of Linux that Python runs on
ASK_VERSION, BELOW_PATH = 1, 1
# The Landlock rights of each letter for files, and more for folders: to list them, and to create and remove files.
RUN, WRITE, READ = 1 << 0, 1 << 1, 1 << 2
LIST, CHANGE = 1 << 3, sum(1 << bit for bit in range(4, 13))
MOVE, TRUNCATE = 1 << 13, 1 << 14
MOVE_SINCE, TRUNCATE_SINCE = 2, 3
PR_SET_NO_NEW_PRIVS = 38


def main() -> None:
    end = sys.argv.index("--")
    _, allowed = resource.getrlimit(resource.RLIMIT_DATA)
    most = int(sys.argv[1]) if allowed == resource.RLIM_INFINITY else min(int(sys.argv[1]), allowed)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    asked = sys.platform == "linux" and end > 2
    version = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ASK_VERSION) if asked else 0
    if version > 0:
        of_files = {"r": READ, "w": WRITE | (TRUNCATE if version >= TRUNCATE_SINCE else 0), "x": RUN}
        of_folders = {"r": LIST, "w": CHANGE | (MOVE if version >= MOVE_SINCE else 0), "x": 0}
        handled = struct.pack("Q", sum((*of_files.values(), *of_folders.values())))
        rules = libc.syscall(CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
        refused = rules < 0
        for place in sys.argv[2:end]:
            letters, device, inode, path = place.split(":", 3)
            try:
                at = os.open(path, os.O_PATH | os.O_CLOEXEC | (os.O_NOFOLLOW if int(inode) else 0))
            except FileNotFoundError:
                continue
            state = os.fstat(at)
            if int(inode) and (state.st_dev, state.st_ino) != (int(device), int(inode)):
                _refuse(f"{path} was replaced meanwhile")
            rights = sum(of_files[one] | (of_folders[one] if stat.S_ISDIR(state.st_mode) else 0) for one in letters)
            refused |= libc.syscall(ADD_RULE, rules, BELOW_PATH, struct.pack("=Qi", rights, at), 0) != 0
        refused |= libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
        refused |= libc.syscall(RESTRICT_SELF, rules, 0) != 0
        if refused:
            _refuse("the kernel refused to keep git within its repository")
    os.execv(sys.argv[end + 1], sys.argv[end + 1 :])  # noqa: S606 - that is what it is for


def _refuse(why: str) -> None:
    """End as git does. Its exit code 1 would say that there is no such object."""
    print(f"fatal: {why}", file=sys.stderr)
    sys.exit(128)


if __name__ == "__main__":
    main()
