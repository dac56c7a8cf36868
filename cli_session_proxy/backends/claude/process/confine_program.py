"""What bubblewrap leaves open, closed before it starts: run as `python -I -S confine_program.py COMMAND …`.

- The kernel's keys, such as a Kerberos ticket: the command gets an empty session keyring, and all calls about keys are
  refused. The user's keyring belongs to whoever has the uid, in any namespace: its number stands in /proc/keys.
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
# The same by the kernel's name of the architecture (AUDIT_ARCH_*), with those of 32 bits, whose programs run as well.
# `add_key` and `request_key` are the two numbers before it.
REFUSED = {
    0xC000003E: 250, 0x40000003: 288, 0xC00000B7: 219, 0x40000028: 311, 0xC00000F3: 219, 0xC0000015: 271,
    0x80000016: 280, 0x00000016: 280,
}  # fmt: skip
X32 = 0x40000000  # a bit of the number by which x86-64 marks another table with the same numbers
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
RET_ALLOW, RET_ERRNO = 0x7FFF0000, 0x00050000
LOAD, AND, IS_EQUAL, IS_AT_LEAST, IS_MORE, RETURN = 0x20, 0x54, 0x15, 0x35, 0x25, 0x06  # of BPF
NUMBER, ARCHITECTURE = 0, 4  # offsets of what is loaded
# A kernel without keyrings; a container that forbids the call forbids it to the command as well.
NO_KEYRINGS = (errno.ENOSYS, errno.EPERM)


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    keyctl = KEYCTL.get(os.uname().machine)
    refused = keyctl is not None and libc.syscall(keyctl, JOIN_SESSION_KEYRING, None) < 0
    has_keys = keyctl is not None and not (refused and ctypes.get_errno() in NO_KEYRINGS)
    refused = refused and has_keys
    refused |= libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
    if libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ASK_VERSION) >= SCOPES_SINCE:
        handled = struct.pack("QQQ", 0, 0, ABSTRACT_SOCKETS)  # nothing of files, nothing of ports
        rules = libc.syscall(LANDLOCK_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
        refused |= rules < 0
        refused |= libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0) != 0
    code = ctypes.create_string_buffer(_no_keys())
    program = struct.pack("HP", len(code) // 8, ctypes.addressof(code))
    refused |= libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0) != 0 and has_keys
    if refused:
        sys.exit("the kernel refused to close the session's keys or sockets without a path")
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - that is what it is for


def _no_keys() -> bytes:
    """A filter of system calls (BPF) by which there are none about keys, as in a kernel without."""
    code = [(LOAD, 0, 0, ARCHITECTURE)]
    for architecture, keyctl in REFUSED.items():
        code += [
            (IS_EQUAL, 0, 6, architecture), (LOAD, 0, 0, NUMBER), (AND, 0, 0, ~X32 & 0xFFFFFFFF),
            (IS_AT_LEAST, 0, 2, keyctl - 2), (IS_MORE, 1, 0, keyctl), (RETURN, 0, 0, RET_ERRNO | errno.ENOSYS),
            (RETURN, 0, 0, RET_ALLOW),
        ]  # fmt: skip
    return b"".join(struct.pack("=HBBI", *one) for one in (*code, (RETURN, 0, 0, RET_ALLOW)))


if __name__ == "__main__":
    main()
