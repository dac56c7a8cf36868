"""Another CLI: it keeps one conversation in a file of its own, and asks a model for each line that it is told.

Started as `program.py FILE URL MODEL`. It takes the content of one user's message as JSON on each line of its input.
It answers with a line: {"content": […], "usage": {…}} once both messages are in its file, or {"error": …, "status": …}.
"""

from __future__ import annotations

import http.client
import json
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


def answer(url: str, model: str, messages: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    body = {"model": model, "max_tokens": 1000, "stream": False, "messages": messages}
    connection.request("POST", "/v1/messages", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    found: dict[str, Any] = json.loads(response.read())
    return response.status, found


def main(file: Path, url: str, model: str) -> None:
    told = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for line in sys.stdin:
        asked = {"role": "user", "content": json.loads(line)}
        status, found = answer(url, model, [*told, asked])
        if status != 200:
            print(json.dumps({"error": found["error"]["message"], "status": status}), flush=True)
            continue
        said = {"role": "assistant", "content": found["content"]}
        with file.open("a") as kept:
            kept.writelines(json.dumps(one) + "\n" for one in (asked, said))
        told += [asked, said]
        print(json.dumps({"content": said["content"], "usage": found["usage"]}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
