"""Run a program with the system calls that units allow: `python unit_calls.py UNIT… -- COMMAND`.

What of `SystemCallFilter` systemd would make a filter of. Its own groups are asked of `systemd-analyze`, numbers are
those of this machine's headers (x86-64).
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

NUMBERS = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
X86_64, EPERM, ALLOW = 0xC000003E, 0x00050001, 0x7FFF0000
LOAD, IS_EQUAL, RETURN = 0x20, 0x15, 0x06  # of BPF
# What systemd allows with every list of allowed calls.
DEFAULT = "@default"


def calls(words: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for word in words:
        if not word.startswith("@"):
            found.add(word)
            continue
        done = subprocess.run(["systemd-analyze", "syscall-filter", word], check=True, capture_output=True, text=True)
        lines = (line.strip() for line in done.stdout.splitlines()[1:])
        found |= calls(line for line in lines if line and not line.startswith("#"))
    return found


def allowed(units: Iterable[Path]) -> set[str]:
    found = calls([DEFAULT])
    for line in re.findall(r"^SystemCallFilter=(.*)$", "\n".join(unit.read_text() for unit in units), re.M):
        named = calls(line.removeprefix("~").split())
        found = found - named if line.startswith("~") else found | named
    return found


def restrict(names: set[str]) -> None:
    numbers = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", NUMBERS.read_text())}
    code = [(LOAD, 0, 0, 4), (IS_EQUAL, 1, 0, X86_64), (RETURN, 0, 0, EPERM), (LOAD, 0, 0, 0)]
    for number in sorted(numbers[name] for name in names & numbers.keys()):
        code += [(IS_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    code.append((RETURN, 0, 0, EPERM))
    text = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, struct.pack("HP", len(code), ctypes.addressof(text)), 0, 0):
        raise OSError(ctypes.get_errno(), "no filter")


if __name__ == "__main__":
    at = sys.argv.index("--")
    restrict(allowed(map(Path, sys.argv[1:at])))
    os.execvp(sys.argv[at + 1], sys.argv[at + 1 :])
