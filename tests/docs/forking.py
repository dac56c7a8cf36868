"""Python programs, each as `python -` runs it, in forks of one interpreter that imports what they need before: a client
takes a second of a processor to be imported, and every program of the documents imports one.

Standard input and output: a line of JSON for each program, and two for it: the program's pid, and how it ended.
"""

from __future__ import annotations

import atexit
import importlib
import json
import multiprocessing
import os
import sys
from typing import Any


def run(asked: dict[str, Any]) -> None:
    """In a session, an environment and a place of its own, with nothing to read, as if it had been started so."""
    os.setsid()
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    said = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for target in (1, 2):
        os.dup2(said, target)
    sys.argv = ["-"]
    try:
        exec(compile(asked["code"], "<stdin>", "exec"), {"__name__": "__main__"})
    finally:
        atexit._run_exitfuncs()  # a fork ends without the rest: to take all modules apart takes two seconds


def main() -> None:
    forks = multiprocessing.get_context("fork")
    for line in sys.stdin:
        asked = json.loads(line)
        for module in asked["modules"]:
            importlib.import_module(module)
        program = forks.Process(target=run, args=(asked,))
        program.start()
        print(json.dumps({"pid": program.pid}), flush=True)
        program.join()
        print(json.dumps({"status": program.exitcode}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
