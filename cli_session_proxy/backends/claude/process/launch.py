"""Everything that decides what one CLI process is, and its command line. Pure."""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path

from ....domain.client_tools import SERVER, Offers
from ....domain.models import JSON
from ....errors import ClaudeUnavailable
from ....settings import Profile
from .capability import Capability

# A CLI deletes other sessions' files after this many days at its own start (default 30): never ours.
KEEP_DAYS = 36500

# CLIs without --tools: every tool a 1.x or 2.0 CLI has had is named, so that its requests carry none
# (run on 1.0.120: `tools` of the request is empty; "*" would not do, nor would --permission-mode plan).
KNOWN_TOOLS = (
    "Agent", "AskUserQuestion", "Bash", "BashOutput", "Edit", "EnterPlanMode", "ExitPlanMode", "Glob", "Grep",
    "KillBash", "KillShell", "LS", "LSP", "ListMcpResourcesTool", "Monitor", "MultiEdit", "NotebookEdit",
    "NotebookRead", "Read", "ReadMcpResourceTool", "Skill", "SlashCommand", "Task", "TaskCreate", "TaskGet",
    "TaskList", "TaskOutput", "TaskStop", "TaskUpdate", "TodoRead", "TodoWrite", "ToolSearch", "WebFetch", "WebSearch",
    "Write", "exit_plan_mode",
)  # fmt: skip
# Offered with an MCP server, whatever the tools; they read what the server of the profile offers.
MCP_HELPERS = frozenset({"ListMcpResourcesTool", "ReadMcpResourceTool"})
ALL_TOOLS = "default"  # the word that --tools takes for the whole set


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of a CLI. `session_id` is created, or taken up where `resume` is set.

    `model`, `system_prompt` and `effort` are final: the profile's own wishes are resolved by the caller.
    `profile.tools`: plain names become available, rules such as `Bash(git *)` or `mcp__…` are allowed as well;
    everything else is up to `permission_mode`. `settings` is merged into --settings. `env` is everything.
    `offers` are the client's own tools: given to the running process, which can be given others later.
    `ahead`: it has no session's directory yet and waits for one (`ClaudeProcess.claim`). `wrapper` is the beginning of
    the command line of a confined one (`confine`).
    """

    capability: Capability
    cwd: Path
    session_id: str
    resume: bool
    model: str
    profile: Profile
    env: tuple[tuple[str, str], ...] = field(repr=False)
    system_prompt: str | None = field(default=None, repr=False)
    append_system_prompt: str | None = field(default=None, repr=False)
    effort: str | None = None
    settings: JSON = field(default_factory=dict, compare=False)
    offers: Offers = field(default_factory=Offers, compare=False)
    ahead: bool = field(default=False, compare=False)
    wrapper: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def argv(self, prompt_file: Path | None = None) -> list[str]:
        """The command line. With `prompt_file` the system prompt is read from there (see `wants_prompt_file`)."""
        session = f"--resume={self.session_id}" if self.resume else f"--session-id={self.session_id}"
        argv = ["-p", "--input-format", "stream-json", "--output-format", "stream-json", "--verbose"]
        argv += [flag for flag in ("--include-partial-messages", "--strict-mcp-config") if self._has(flag)]
        if self._has("--system-prompt-snapshot"):  # else another system prompt is ignored at a resume
            argv.append("--system-prompt-snapshot=off")
        if self.ahead:
            argv.append("--await-claim")
        return [*self.wrapper, str(self.capability.path), *argv, session, *self._choices(prompt_file)]

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for two launches that one warm process can serve: everything but `resume`, and but the text of
        the system prompt where the process can be given another one (`ClaudeProcess.adapt`)."""
        changeable = self.capability.takes_system_prompt and bool((self.system_prompt or "").strip())
        system = True if changeable else self.system_prompt
        choices = self.model, self.effort, self.profile, system, self.append_system_prompt, self.settings
        return (self.session_id, self.cwd, self.env, self.capability, *choices)

    @property
    def kind(self) -> str | None:
        """Equal for a launch and the spares that can become it: all but what a claim tells them. None: it takes none.

        Only a new session of an agent without the CLI's tools takes one: the spare's TMPDIR stays its own, and nothing
        of the agent's directory (settings, MCP servers) may decide how the CLI starts. The model is part of it: given
        to a running process, it would be told to the model as a `/model` command of the user (run on 2.1.329).
        """
        profile = self.profile
        own = profile.tools or profile.add_dirs or profile.mcp_config or profile.setting_sources or profile.confined
        if not self.capability.takes_claim or self.resume or own or self.append_system_prompt is not None:
            return None
        if not self.ahead and not (self.system_prompt or "").strip():
            return None
        choices = replace(self, system_prompt=None)._choices(None), self.settings
        env = [(name, value) for name, value in self.env if name != "TMPDIR"]
        return hashlib.sha256(json.dumps((str(self.capability), env, choices), default=str).encode()).hexdigest()

    def spare(self, cwd: Path, tmpdir: Path) -> Launch:
        """A start ahead of time, for some later launch of this `kind`. The directories are its own until then."""
        env = tuple(sorted((dict(self.env) | {"TMPDIR": str(tmpdir)}).items()))
        session_id = str(uuid.uuid4())
        return replace(
            self, cwd=cwd, env=env, session_id=session_id, system_prompt=None, offers=Offers(), resume=False, ahead=True
        )

    @property
    def wants_prompt_file(self) -> bool:
        """A system prompt goes by file where the CLI takes one: argv is public on the machine and bounded
        (128 KB an argument on Linux)."""
        return self.system_prompt is not None and self._has("--system-prompt-file")

    def _has(self, flag: str) -> bool:
        return flag in self.capability.flags

    def _choices(self, prompt_file: Path | None) -> list[str]:
        argv = [] if self.model == "default" else [f"--model={self.model}"]
        if self.effort is not None and self._has("--effort"):
            argv.append(f"--effort={self.effort}")
        if self._has("--setting-sources"):
            argv.append(f"--setting-sources={','.join(self.profile.setting_sources)}")
        if self._has("--settings"):
            argv.append("--settings=" + json.dumps({"cleanupPeriodDays": KEEP_DAYS, **self.settings}))
        if self.profile.permission_mode in self.capability.permission_modes:
            argv.append(f"--permission-mode={self.profile.permission_mode}")
        argv += [f"--add-dir={folder}" for folder in self.profile.add_dirs]
        if self.profile.mcp_config is not None:
            argv.append(f"--mcp-config={self.profile.mcp_config}")
        return argv + self._tools() + self._prompts(prompt_file)

    def _tools(self) -> list[str]:
        rules = [f"mcp__{SERVER}"] if self.capability.takes_tools else []
        rules += [tool for tool in self.profile.tools if "(" in tool or tool.startswith("mcp__")]
        names = list(dict.fromkeys(tool.split("(")[0] for tool in self.profile.tools if not tool.startswith("mcp__")))
        argv = [f"--allowedTools={','.join(rules)}"] if rules else []
        if self.capability.chooses_tools:
            return [*argv, f"--tools={','.join(names)}"]
        denied = [] if ALL_TOOLS in names else [tool for tool in KNOWN_TOOLS if tool not in names]
        return [*argv, f"--disallowedTools={','.join(denied)}"] if denied else argv

    def _prompts(self, prompt_file: Path | None) -> list[str]:
        argv = [] if self.append_system_prompt is None else [f"--append-system-prompt={self.append_system_prompt}"]
        if prompt_file is not None:
            argv.append(f"--system-prompt-file={prompt_file}")
        elif self.system_prompt is not None:
            flag = "--system-prompt" if self._has("--system-prompt") else "--append-system-prompt"
            argv.append(f"{flag}={self.system_prompt}")
        return argv


def printable(text: str) -> str:
    """A lone surrogate has no UTF-8 form; the CLI itself would show it to the model as U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def check_tools(launch: Launch, init: JSON) -> None:
    """Raises ClaudeUnavailable where the CLI's `init` frame offers tools that the launch does not allow."""
    allowed = {tool.split("(")[0] for tool in launch.profile.tools}
    offered = {str(tool) for tool in init.get("tools") or () if not str(tool).startswith("mcp__")}
    if allowed or offered <= MCP_HELPERS:
        return  # with a profile's tools nothing is compared: newer CLIs offer some under other names
    names = ", ".join(sorted(offered))
    raise ClaudeUnavailable(
        f"Claude CLI {launch.capability.version} offers tools that are off here ({names}): use another version"
    )
