"""What bubblewrap leaves open, closed before it starts: run as `python -I -S confine_program.py COMMAND …`.

- The keys of the session keyring, such as a Kerberos ticket: the command gets an empty one.
- Sockets in the abstract namespace, which no mount hides. A session bus or an X server that listens on one takes
  every process of its user for that user. Landlock closes them (Linux 6.12, its version 6); before, they stay open.

Only the standard library is imported. It fails where the kernel has what is needed and refuses it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF = 444, 446  # on every architecture of Linux that Python runs on
ASK_VERSION = 1
SCOPES_SINCE = 6
ABSTRACT_SOCKETS = 1  # LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET
PR_SET_NO_NEW_PRIVS = 38
JOIN_SESSION_KEYRING = 1
KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219, "ppc64le": 271, "s390x": 280, "armv7l": 311}
# A kernel without keyrings; a container that forbids the call forbids it to the command as well.
NO_KEYRINGS = (errno.ENOSYS, errno.EPERM)


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    keyctl = KEYCTL.get(os.uname().machine)
    refused = keyctl is not None and libc.syscall(keyctl, JOIN_SESSION_KEYRING, None) < 0
    refused = refused and ctypes.get_errno() not in NO_KEYRINGS
    if libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ASK_VERSION) >= SCOPES_SINCE:
        handled = struct.pack("QQQ", 0, 0, ABSTRACT_SOCKETS)  # nothing of files, nothing of ports
        rules = libc.syscall(LANDLOCK_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
        refused |= rules < 0 or libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
        refused |= libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0) != 0
    if refused:
        sys.exit("the kernel refused to close the session's keys or sockets without a path")
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - that is what it is for


if __name__ == "__main__":
    main()
