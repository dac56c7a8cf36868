"""The image, built by the engine that is here and used as docs/self-hosting.md says: `make image`.

    ENGINE   docker, podman or buildah, with options of its own ("buildah --storage-driver vfs"); else the first found
    BASE     another base image, where the Dockerfile's cannot be had

What runs inside is a script on the container's stdin, so that one way fits all three.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from string import Template

import pytest

from ..conftest import ROOT
from .dockerfile import health_check, only, start

pytestmark = [pytest.mark.image, pytest.mark.timeout(1800)]

BUILD_LIMIT = 1500
RUN_LIMIT = 300
TAG = "cli-session-proxy-under-test"
KEY = "a-key-for-the-container-0123"
TOKEN = "sk-ant-oat01-fake-for-tests"

# A scripted model, the program as the image starts it, and one question; the model is reached by the token alone.
SESSION = Template("""
set -eu
trap 'kill $$model $${served:-} 2> /dev/null || true' EXIT
python -m turnfault.provider.upstream --port 8999 > /dev/null & model=$$!
export CLI_SESSION_PROXY_KEYS__ME=$key CLI_SESSION_PROXY_I_AM_THE_ONLY_USER=true CLAUDE_CODE_OAUTH_TOKEN=$token
export ANTHROPIC_BASE_URL=http://127.0.0.1:8999 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
$start & served=$$!
until $health 2> /dev/null; do kill -0 $$served; done
python - <<'PYTHON'
import json, urllib.request
body = json.dumps({"model": "sonnet", "messages": [{"role": "user", "content": "$said"}]}).encode()
headers = {"Authorization": "Bearer $key", "X-Agent-Id": "ada"}
asked = urllib.request.Request("http://127.0.0.1:8787/v1/chat/completions", body, headers)
print("answer:", json.load(urllib.request.urlopen(asked, timeout=120))["choices"][0]["message"]["content"])
PYTHON
kill $$served
wait $$served && echo "ended well"
""")


def engine() -> list[str]:
    named = os.environ.get("ENGINE")
    found = named or next((name for name in ("docker", "podman", "buildah") if shutil.which(name)), None)
    if found is None:
        pytest.fail("no container engine: install docker, podman or buildah, or name one in ENGINE")
    return shlex.split(found)


class Engine:
    """One of the three. What is made under `TAG` is removed by `close`."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._command = command
        self._buildah = Path(command[0]).name == "buildah"
        self._volumes = {target: f"{TAG}-{target.strip('/')}" for target in only("VOLUME").words()}
        self._containers: list[str] = []
        if self._buildah:  # it has no volumes: folders, owned as a new volume would be
            for target, name in self._volumes.items():
                self._volumes[target] = str(folder / name)
                Path(self._volumes[target]).mkdir(mode=0o700)
                os.chown(self._volumes[target], 1000, 1000)
            for above in (folder, *folder.parents[:3]):
                above.chmod(above.stat().st_mode | 0o011)

    def build(self) -> None:
        base = os.environ.get("BASE")
        other = ["--build-arg", f"BASE={base}", "--pull=false"] if base else []
        self._run("build", *other, "--tag", TAG, str(ROOT), limit=BUILD_LIMIT)

    def sh(self, script: str) -> str:
        """Output of a script in a new container on the volumes, as the image's own user."""
        mounts = [f"--volume={source}:{target}" for target, source in self._volumes.items()]
        if not self._buildah:
            return self._run("run", "--rm", "--interactive", *mounts, "--entrypoint", "sh", TAG, "-s", script=script)
        container = self._run("from", "--pull-never", TAG).strip()
        self._containers.append(container)
        # With the image's own VOLUMEs in place it forgets the second of two mounts (buildah 1.28, chroot isolation).
        self._run("config", *(f"--volume={target}-" for target in self._volumes), container)
        return self._run("run", *mounts, container, "--", "sh", "-s", script=script)

    def close(self) -> None:
        for container in self._containers:
            self._run("rm", container)
        if not self._buildah:
            self._run("volume", "rm", *self._volumes.values())
        self._run("rmi", TAG)

    def _run(self, *arguments: str, script: str = "", limit: float = RUN_LIMIT) -> str:
        done = subprocess.run(
            [*self._command, *arguments], input=script, check=False, capture_output=True, text=True, timeout=limit
        )
        assert done.returncode == 0, f"{arguments}:\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    built = Engine(engine(), tmp_path_factory.mktemp("volumes"))
    built.build()
    yield built
    built.close()


def session(said: str) -> str:
    return SESSION.substitute(
        start=shlex.join(start()), health=shlex.join(health_check()), said=said, key=KEY, token=TOKEN
    )


def test_it_runs_as_a_user_who_owns_its_folders_and_nothing_else(image: Engine) -> None:
    told = image.sh(
        "id -u; id -un; ! ls -d /lock /wheel 2> /dev/null && test ! -w /usr/local/bin -a ! -w / && echo clean; pwd"
    )
    assert told.splitlines() == ["1000", only("USER").text, "clean", only("WORKDIR").text]


def test_without_a_key_it_does_not_start(image: Engine) -> None:
    assert "[keys]" in image.sh(f"{shlex.join(start())} 2>&1; test $? = 2")


def test_the_cli_is_there_and_what_is_missing_is_told(image: Engine) -> None:
    told = json.loads(image.sh("cli-session-proxy doctor --json || true"))
    found = {one["check"]: one for one in told}
    assert found["claude"]["level"] == "ok"
    assert "cli-session-proxy login" in found["login"]["mend"]
    assert {name for name, one in found.items() if one["level"] == "error"} == {"login"}


def test_a_token_is_a_login_and_the_next_container_on_the_volumes_remembers(image: Engine) -> None:
    assert "answer: Noted: colour is teal.\nended well" in image.sh(session("Remember: the colour is teal"))
    assert "answer: colour is teal.\nended well" in image.sh(session("What is the colour?"))
