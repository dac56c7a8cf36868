"""Run a command that writes only below some folders: `python -I -S within_program.py FOLDER … -- COMMAND …`.

Landlock (Linux 5.13) refuses it to make, change or remove files elsewhere, wherever links lead: an agent that writes in
the repository can put a link in place while git works. Where there is no Landlock the command runs as it is.

Only the standard library is imported.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # on every architecture of Linux that Python runs on
ASK_VERSION, BELOW_PATH = 1, 1
WRITE_FILE = 1 << 1
# Also to remove and make files of each kind (bits 4 to 12), to move them between folders, and to truncate.
WRITES = WRITE_FILE | sum(1 << bit for bit in range(4, 13))
MOVE, TRUNCATE = 1 << 13, 1 << 14
MOVE_SINCE, TRUNCATE_SINCE = 2, 3
PR_SET_NO_NEW_PRIVS = 38


def main() -> None:
    end = sys.argv.index("--")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    version = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ASK_VERSION) if sys.platform == "linux" else 0
    if version > 0:
        rights = WRITES | (MOVE if version >= MOVE_SINCE else 0) | (TRUNCATE if version >= TRUNCATE_SINCE else 0)
        handled = struct.pack("Q", rights)
        rules = libc.syscall(CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
        refused = rules < 0
        for place in (*sys.argv[1:end], os.devnull):
            at = os.open(place, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
            given = rights if os.path.isdir(place) else WRITE_FILE
            refused |= libc.syscall(ADD_RULE, rules, BELOW_PATH, struct.pack("=Qi", given, at), 0) != 0
        refused |= libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
        refused |= libc.syscall(RESTRICT_SELF, rules, 0) != 0
        if refused:
            sys.exit("fatal: the kernel refused to keep git within its repository")
    os.execvp(sys.argv[end + 1], sys.argv[end + 1 :])  # noqa: S606 - that is what it is for


if __name__ == "__main__":
    main()
