"""What bubblewrap leaves open, closed before it starts: run as `python -I -S confine_program.py COMMAND …`.

- The kernel's keys, such as a Kerberos ticket: the command gets an empty session keyring, and all calls about keys are
  refused. The user's keyring belongs to whoever has the uid, in any namespace: its number stands in /proc/keys.
- Sockets in the abstract namespace, which no mount hides. A session bus or an X server that listens on one takes
  every process of its user for that user. Landlock closes them (Linux 6.12, its version 6); before, they stay open.
- Calls that write into another process (ptrace). By them bubblewrap's own first process inside could be told not to end
  with its parent, and to hide its mark: all that runs inside would outlive the CLI and the proxy.
- `userfaultfd`, where the machine allows it to everybody: whoever reads the memory of a process there, such as its
  environment, would wait until that process provides it.
- Subvolumes of btrfs. A snapshot of the one that an agent may write in shows what a mount hides, such as `var`. One of
  its own could not be removed, and whoever makes one read-only stops all that is written in it.
- Leases. Who has one on a file that is shown, if only to read, holds up everybody outside who opens it.
- Core dumps. The machine's handler runs outside, often as root, and stores them. A limit of 0 does not keep the kernel
  from starting it, a limit of 1 does (core(5)); so the limit cannot be changed inside. Where no limit keeps it (a
  socket as the handler, Linux 6.16), a dump has no memory in it.
- If there is no memory left, the kernel ends a program inside, not the proxy. Nothing inside can change that: /proc is
  read-only there.

Only the standard library is imported. It fails where the kernel has what is needed and refuses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import struct
import sys

LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF = 444, 446  # on every architecture of Linux that Python runs on
ASK_VERSION = 1
SCOPES_SINCE = 6
ABSTRACT_SOCKETS = 1  # LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET
PR_SET_NO_NEW_PRIVS = 38
JOIN_SESSION_KEYRING = 1
KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219, "ppc64le": 271, "s390x": 280, "armv7l": 311}
# What is refused: `keyctl`, `ptrace`, `process_vm_writev`, `userfaultfd`, by the kernel's name of the architecture
# (AUDIT_ARCH_*), and with those of 32 bits, whose programs run as well. `add_key` and `request_key` are the two numbers
# before `keyctl`.
REFUSED = {
    0xC000003E: (250, 101, 311, 323, 521, 540), 0x40000003: (288, 26, 348, 374), 0xC00000B7: (219, 117, 271, 282),
    0x40000028: (311, 26, 377, 388), 0xC00000F3: (219, 117, 271, 282), 0xC0000015: (271, 26, 352, 364),
    0x80000016: (280, 26, 341, 355), 0x00000016: (280, 26, 341, 355),
}  # fmt: skip
# `fcntl`, by which leases are taken.
FCNTL = {
    0xC000003E: (72,), 0x40000003: (55, 221), 0xC00000B7: (25,), 0x40000028: (55, 221), 0xC00000F3: (25,),
    0xC0000015: (55,), 0x80000016: (55,), 0x00000016: (55, 221),
}  # fmt: skip
# `ioctl`, by which subvolumes are made, copied, removed and made read-only. The rest of a command's number is the size
# of its argument, and `FICLONE` (`cp --reflink`) is another command of these.
IOCTL = {
    0xC000003E: (16, 514), 0x40000003: (54,), 0xC00000B7: (29,), 0x40000028: (54,), 0xC00000F3: (29,),
    0xC0000015: (54,), 0x80000016: (54,), 0x00000016: (54,),
}  # fmt: skip
OF_SUBVOLUMES = (0x9401, 0x940E, 0x940F, 0x9417, 0x9418, 0x941A, 0x943F)
F_SETLEASE, F_SETDELEG = 1024, 1040  # of a file; of a folder (Linux 6.19)
# `setrlimit` and `prlimit64`. They report success for the limit of core dumps: gpg ends if it cannot switch them off.
LIMITS = {
    0xC000003E: (160, 302), 0x40000003: (75, 340), 0xC00000B7: (164, 261), 0x40000028: (75, 369),
    0xC00000F3: (164, 261), 0xC0000015: (75, 325), 0x80000016: (75, 334), 0x00000016: (75, 334),
}  # fmt: skip
RLIMIT_CORE, NO_PIPE = 4, 1
# Of 1000: more than any process has that uses less than half of the memory.
FIRST_TO_END = 500
X32 = 0x40000000  # a bit of the number by which x86-64 marks another table, with numbers of its own for some (521, 540)
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
RET_ALLOW, RET_ERRNO = 0x7FFF0000, 0x00050000
LOAD, AND, IS_EQUAL, IS_AT_LEAST, IS_MORE, RETURN = 0x20, 0x54, 0x15, 0x35, 0x25, 0x06  # of BPF
NUMBER, ARCHITECTURE = 0, 4  # offsets of what is loaded
FIRST, COMMAND = (16, 24) if sys.byteorder == "little" else (20, 28)  # the low halves of the first two arguments
THIRD = (32, 36)  # both halves of the third one
# A kernel without keyrings; a container that forbids the call forbids it to the command as well.
NO_KEYRINGS = (errno.ENOSYS, errno.EPERM)


def main() -> None:
    for name, value in (("coredump_filter", "0"), ("oom_score_adj", str(FIRST_TO_END))):
        # FileNotFoundError: this kernel has no such file. A value that is higher already stays: only root may lower it.
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/{name}", "r+") as file:
            if name == "coredump_filter" or int(file.read()) < FIRST_TO_END:
                file.seek(0)
                file.write(value)
    with contextlib.suppress(ValueError):  # there is a limit of 0 already, and only root may raise it
        resource.setrlimit(resource.RLIMIT_CORE, (NO_PIPE, NO_PIPE))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    keyctl = KEYCTL.get(os.uname().machine)
    join_failed = keyctl is not None and libc.syscall(keyctl, JOIN_SESSION_KEYRING, None) < 0
    has_keys = keyctl is not None and not (join_failed and ctypes.get_errno() in NO_KEYRINGS)
    refused = join_failed and has_keys
    refused |= libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
    if libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ASK_VERSION) >= SCOPES_SINCE:
        handled = struct.pack("QQQ", 0, 0, ABSTRACT_SOCKETS)  # nothing of files, nothing of ports
        rules = libc.syscall(LANDLOCK_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
        refused |= rules < 0
        refused |= libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0) != 0
    code = ctypes.create_string_buffer(_filter())
    program = struct.pack("HP", len(code) // 8, ctypes.addressof(code))
    not_filtered = libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0) != 0
    # EINVAL: this kernel has no filters. That is accepted only if there are no keys.
    refused |= not_filtered and (has_keys or ctypes.get_errno() != errno.EINVAL)
    if refused:
        sys.exit("the kernel refused to close the session's keys, sockets without a path or other processes")
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - that is what it is for


def _filter() -> bytes:
    """A filter of system calls (BPF), by which these do not exist or change nothing."""
    code = [(LOAD, 0, 0, ARCHITECTURE)]
    for architecture, (keyctl, *others) in REFUSED.items():
        calls = [(LOAD, 0, 0, NUMBER), (AND, 0, 0, ~X32 & 0xFFFFFFFF)]
        for first, last in ((keyctl - 2, keyctl), *zip(others, others, strict=True)):
            calls += [(IS_AT_LEAST, 0, 2, first), (IS_MORE, 1, 0, last), (RETURN, 0, 0, RET_ERRNO | errno.ENOSYS)]
        for number in FCNTL[architecture]:
            calls += [
                (IS_EQUAL, 0, 5, number), (LOAD, 0, 0, COMMAND), (IS_EQUAL, 1, 0, F_SETLEASE),
                (IS_EQUAL, 0, 1, F_SETDELEG), (RETURN, 0, 0, RET_ERRNO | errno.EINVAL), (RETURN, 0, 0, RET_ALLOW),
            ]  # fmt: skip
        commands = [(IS_EQUAL, len(OF_SUBVOLUMES) - at, 0, one) for at, one in enumerate(OF_SUBVOLUMES)]
        for number in IOCTL[architecture]:
            calls += [
                (IS_EQUAL, 0, len(commands) + 4, number), (LOAD, 0, 0, COMMAND), (AND, 0, 0, 0xFFFF), *commands,
                (RETURN, 0, 0, RET_ALLOW), (RETURN, 0, 0, RET_ERRNO | errno.EPERM),
            ]  # fmt: skip
        setrlimit, prlimit = LIMITS[architecture]  # to read a limit (`prlimit` without a third argument) is allowed
        calls += [
            (IS_EQUAL, 0, 4, setrlimit), (LOAD, 0, 0, FIRST), (IS_EQUAL, 0, 1, RLIMIT_CORE),
            (RETURN, 0, 0, RET_ERRNO), (RETURN, 0, 0, RET_ALLOW),
            (IS_EQUAL, 0, 7, prlimit), (LOAD, 0, 0, COMMAND), (IS_EQUAL, 0, 5, RLIMIT_CORE),
            (LOAD, 0, 0, THIRD[0]), (IS_EQUAL, 0, 2, 0), (LOAD, 0, 0, THIRD[1]), (IS_EQUAL, 1, 0, 0),
            (RETURN, 0, 0, RET_ERRNO),
        ]  # fmt: skip
        calls.append((RETURN, 0, 0, RET_ALLOW))
        code += [(IS_EQUAL, 0, len(calls), architecture), *calls]
    return b"".join(struct.pack("=HBBI", *one) for one in (*code, (RETURN, 0, 0, RET_ALLOW)))


if __name__ == "__main__":
    main()
