"""A server that forgets, squeezes or doubles on purpose: `python toy.py KIND PORT`. It speaks Chat Completions.

memory      keeps each agent's messages in its own memory, which ends with it
forgetful   sends the newest message only
flat        sends the whole conversation as one text of the user's
doubling    sends every earlier message twice
shared      keeps one conversation for all agents
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

KIND = sys.argv[1] if len(sys.argv) > 1 else "memory"
kept: dict[str, list[dict[str, Any]]] = {}
locks: dict[str, Lock] = {}


def told(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if KIND == "forgetful":
        return messages[-1:]
    if KIND == "flat":
        return [{"role": "user", "content": "\n".join(f"{one['role']}: {one['content']}" for one in messages)}]
    if KIND == "doubling":
        return [*messages[:-1], *messages]
    return messages


def asked(model: str, messages: list[dict[str, Any]]) -> str:
    body = json.dumps({"model": model, "max_tokens": 100, "messages": told(messages)}).encode()
    url = f"{os.environ['ANTHROPIC_BASE_URL']}/v1/messages"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
        return str(json.load(answer)["content"][0]["text"])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        agent = "all" if KIND == "shared" else self.headers.get("X-Agent-Id", "")
        with locks.setdefault(agent, Lock()):
            before = kept.setdefault(agent, []) if agent else []
            try:
                text = asked(body["model"], [*before, *body["messages"]])
            except urllib.error.URLError:
                return self.reply(502, {"error": "the provider failed"})
            before += [*body["messages"], {"role": "assistant", "content": text}]
        return self.reply(200, {"choices": [{"message": {"role": "assistant", "content": text}}]})

    def reply(self, status: int, data: dict[str, Any]) -> None:
        raw = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
