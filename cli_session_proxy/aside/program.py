"""The program of a helper process: runs one call after the other, each with a limit of processor time.

A call comes as its head, then a pickle of (function, arguments); the answer as its length, then a pickle of
(True, result) or (False, exception). Functions are named by their module, which is imported here at the first call.

The kernel ends this process when a call exceeds its processor time, whatever code is running. If our parent dies, the
end of stdin or that limit ends it.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import struct
import sys

CALL = struct.Struct("!Qd")  # following bytes, seconds of processor time
ANSWER = struct.Struct("!Q")  # following bytes


def main(memory: int) -> None:
    """`memory`: bytes of address space. macOS does not enforce this: there only the time is bounded."""
    if sys.platform.startswith("linux"):
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # left to our parent
    with os.fdopen(0, "rb") as calls, os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # stray prints must not go into the answers
        while head := calls.read(CALL.size):
            size, seconds = CALL.unpack(head)
            pickled = calls.read(size)
            signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process by default
            try:
                function, arguments = pickle.loads(pickled)  # noqa: S301 - our parent wrote it
                answer = pickle.dumps((True, function(*arguments)), pickle.HIGHEST_PROTOCOL)
            except Exception as exc:  # noqa: BLE001 - raised again where the call came from
                answer = pickle.dumps((False, exc), pickle.HIGHEST_PROTOCOL)
            signal.setitimer(signal.ITIMER_PROF, 0)
            answers.write(ANSWER.pack(len(answer)))
            answers.write(answer)
            answers.flush()
