"""The agent programs: how each is pointed at the proxy, told a prompt, resumed, and which tool of its own it is asked
for. Everything else is as it comes."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from ..conftest import ROOT

MODULES = ROOT / ".tools" / "agents" / "node_modules"
MORE_TOOLS = ROOT / ".tools" / "agents-more"
MORE_MODULES = MORE_TOOLS / "node_modules"


class Program(ABC):
    """`url` is the proxy's address without a path, `home` the program's own directory, `work` where it works.

    `tool` is the one of its tools that it reads a file with.
    """

    name: ClassVar[str]
    tool: ClassVar[str]

    def __init__(self, url: str, home: Path, work: Path) -> None:
        self.url = url
        self.home = home
        self.work = work
        self.binary = MODULES / ".bin" / self.name

    @abstractmethod
    def set_up(self) -> dict[str, str]:
        """Writes what it reads at its start; what its environment holds beside PATH and HOME."""

    @abstractmethod
    def say(self, prompt: str, *, first: bool) -> list[str]:
        """The arguments for one prompt: of a new conversation, or of the last one by the program's own resume."""

    def command(self, prompt: str, *, first: bool) -> list[str]:
        return [str(self.binary), *self.say(prompt, first=first)]

    def left(self) -> list[int]:
        """Processes that it leaves running."""
        return []

    @abstractmethod
    def read(self, file: Path) -> dict[str, Any]:
        """The tool's arguments to read a file."""


class Codex(Program):
    name = "codex"
    tool = "functions__exec"

    def set_up(self) -> dict[str, str]:
        folder = self.home / "codex"
        folder.mkdir()
        (folder / "config.toml").write_text(
            'model_provider = "p"\ncheck_for_update_on_startup = false\n'
            f'[model_providers.p]\nname = "p"\nbase_url = "{self.url}/v1"\nenv_key = "K"\nwire_api = "responses"\n'
        )
        return {"K": "none", "CODEX_HOME": str(folder)}

    def say(self, prompt: str, *, first: bool) -> list[str]:
        return ["exec", *([] if first else ["resume", "--last"]), "--skip-git-repo-check", prompt]

    def read(self, file: Path) -> dict[str, Any]:
        return {"input": f'text(await tools.exec_command({{cmd: "cat {file}"}}))'}


class ClaudeCode(Program):
    name = "claude"
    tool = "Read"

    def set_up(self) -> dict[str, str]:
        return {
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": "none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        }

    def say(self, prompt: str, *, first: bool) -> list[str]:
        return ["-p", *([] if first else ["--continue"]), prompt]

    def read(self, file: Path) -> dict[str, Any]:
        return {"file_path": str(file)}


class Gemini(Program):
    name = "gemini"
    tool = "read_file"

    def set_up(self) -> dict[str, str]:
        (self.home / ".gemini").mkdir()
        (self.home / ".gemini" / "settings.json").write_text(
            json.dumps(
                {
                    "security": {"auth": {"selectedType": "gemini-api-key"}},
                    "privacy": {"usageStatisticsEnabled": False},
                    "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
                }
            )
        )
        return {"GOOGLE_GEMINI_BASE_URL": self.url, "GEMINI_API_KEY": "none"}

    def say(self, prompt: str, *, first: bool) -> list[str]:
        return ["--skip-trust", *([] if first else ["--resume", "latest"]), "-p", prompt]

    def read(self, file: Path) -> dict[str, Any]:
        return {"file_path": str(file)}


class OpenCode(Program):
    name = "opencode"
    tool = "read"

    def __init__(self, url: str, home: Path, work: Path) -> None:
        super().__init__(url, home, work)
        # its installation would put the binary of this machine in the place of the one that says it is missing
        self.binary = next(iter(sorted(MODULES.glob("opencode-*/bin/opencode"))), MODULES / "opencode-ai" / "missing")

    def set_up(self) -> dict[str, str]:
        (self.work / "opencode.json").write_text(
            json.dumps(
                {
                    "provider": {
                        "p": {
                            "npm": "@ai-sdk/openai-compatible",
                            "options": {"baseURL": f"{self.url}/v1", "apiKey": "none"},
                            "models": {"sonnet": {}},
                        }
                    },
                    "model": "p/sonnet",
                    "share": "disabled",
                    "autoupdate": False,
                }
            )
        )
        return {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        }

    def say(self, prompt: str, *, first: bool) -> list[str]:
        return ["run", *([] if first else ["--continue"]), *prompt.split()]  # it would quote a prompt with spaces

    def read(self, file: Path) -> dict[str, Any]:
        return {"filePath": str(file)}


class Qwen(Program):
    name = "qwen"
    tool = "read_file"

    def set_up(self) -> dict[str, str]:
        (self.home / ".qwen").mkdir()
        (self.home / ".qwen" / "settings.json").write_text(
            json.dumps(
                {
                    "security": {"auth": {"selectedType": "openai"}},
                    "privacy": {"usageStatisticsEnabled": False},
                    "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
                    "telemetry": {"enabled": False},
                }
            )
        )
        return {"OPENAI_BASE_URL": f"{self.url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "sonnet"}

    def say(self, prompt: str, *, first: bool) -> list[str]:
        return [*([] if first else ["--continue"]), prompt]

    def read(self, file: Path) -> dict[str, Any]:
        return {"file_path": str(file)}


class Pi(Program):
    name = "pi"
    tool = "read"

    def __init__(self, url: str, home: Path, work: Path) -> None:
        super().__init__(url, home, work)
        self.binary = MORE_MODULES / ".bin" / "pi"

    def set_up(self) -> dict[str, str]:
        folder = self.home / ".pi" / "agent"
        folder.mkdir(parents=True)
        provider = {
            "baseUrl": f"{self.url}/v1", "api": "openai-completions", "apiKey": "none", "models": [{"id": "sonnet"}],
        }  # fmt: skip
        (folder / "models.json").write_text(json.dumps({"providers": {"p": provider}}))
        return {"PI_OFFLINE": "1"}

    def say(self, prompt: str, *, first: bool) -> list[str]:
        return ["-p", *([] if first else ["--continue"]), "--provider", "p", "--model", "sonnet", prompt]

    def read(self, file: Path) -> dict[str, Any]:
        return {"path": str(file)}


class Cline(Program):
    """It resumes in a terminal only: there the prompt is typed."""

    name = "cline"
    tool = "read_files"

    def __init__(self, url: str, home: Path, work: Path) -> None:
        super().__init__(url, home, work)
        self.binary = MORE_MODULES / "@cline" / "cli-linux-x64" / "bin" / "cline"

    def set_up(self) -> dict[str, str]:
        provider = {"provider": "openai-compatible", "apiKey": "none", "model": "sonnet", "baseUrl": f"{self.url}/v1"}
        told = {"provider": "openai-compatible", "settings": provider, "updatedAt": "2026-01-01T00:00:00.000Z"}
        folder = self.home / ".cline" / "data" / "settings"
        folder.mkdir(parents=True)
        (folder / "providers.json").write_text(
            json.dumps(
                {"version": 1, "lastUsedProvider": "openai-compatible", "providers": {"openai-compatible": told}}
            )
        )
        return {"CLINE_TELEMETRY_DISABLED": "1"}

    def say(self, prompt: str, *, first: bool) -> list[str]:
        return [prompt] if first else [str(self.home / ".cline" / "data" / "sessions"), prompt]

    def command(self, prompt: str, *, first: bool) -> list[str]:
        command = super().command(prompt, first=first)
        return command if first else [sys.executable, str(Path(__file__).parent / "cline_resumed.py"), *command]

    def left(self) -> list[int]:
        running = self.home / ".cline" / "data" / "locks" / "hub" / "production.json"
        return [json.loads(running.read_text())["pid"]] if running.exists() else []

    def read(self, file: Path) -> dict[str, Any]:
        return {"files": [{"path": str(file)}]}


class Gptme(Program):
    name = "gptme"
    tool = "shell"

    def __init__(self, url: str, home: Path, work: Path) -> None:
        super().__init__(url, home, work)
        self.binary = MORE_TOOLS / "gptme" / "bin" / "gptme"

    def set_up(self) -> dict[str, str]:
        # At each start it fetches a tokenizer of OpenAI's: where no name is resolved, it waits for a minute and more.
        nothing_fetched = {"HTTPS_PROXY": "http://127.0.0.1:9"}
        return {"OPENAI_BASE_URL": f"{self.url}/v1", "OPENAI_API_KEY": "none", "COLUMNS": "1000", **nothing_fetched}

    def say(self, prompt: str, *, first: bool) -> list[str]:
        known = [] if first else ["--resume"]
        return ["--non-interactive", "--model", "local/sonnet", "--tool-format", "tool", *known, prompt]

    def read(self, file: Path) -> dict[str, Any]:
        return {"command": f"cat {file}"}


PROGRAMS: dict[str, type[Program]] = {kind.name: kind for kind in (Codex, ClaudeCode, Gemini, OpenCode, Qwen)}
# `make agents` alone installs and runs these.
MORE: dict[str, type[Program]] = {kind.name: kind for kind in (Pi, Cline, Gptme)}
