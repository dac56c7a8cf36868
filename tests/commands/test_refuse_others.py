"""A subscription serves the person who bought it: `serve` refuses others, and never a person alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cli_session_proxy.commands.prerequisites import TERMS, refuse_others, report
from cli_session_proxy.errors import ConfigError
from cli_session_proxy.http.keys import Keys
from cli_session_proxy.settings import Profile, Settings

from ..conftest import FAKE_KEY

BOTH = {"alice": "alice-secret-0123456789", "bob": "bob-secret-0123456789"}
ONE = {"alice": BOTH["alice"]}
MANY: dict[str, Any] = {"keys": BOTH}
OUTSIDE: dict[str, Any] = {"keys": ONE, "host": "0.0.0.0"}
# A CLI that tells of its login what a file beside it says, and that it was asked.
TELLER = """#!{python}
import sys
from pathlib import Path

here = Path(__file__).parent
if "--help" in sys.argv:
    print("Usage: claude auth [options] [command]")
elif sys.argv[1:3] == ["auth", "status"]:
    (here / "asked").touch()
    print((here / "status.json").read_text())
"""


@pytest.fixture
def teller(tmp_path: Path) -> Path:
    program = tmp_path / "claude"
    program.write_text(TELLER.format(python=sys.executable))
    program.chmod(0o755)
    return program


def with_login(teller: Path, method: str | None, **more: Any) -> Settings:
    told = {"loggedIn": method != "none", "authMethod": method, "apiProvider": "firstParty"}
    (teller.parent / "status.json").write_text(json.dumps(told))
    return Settings(var=teller.parent / "var", claude_bin=teller, claude_config_dir=teller.parent, **more)


@pytest.mark.parametrize("method", ["claude.ai", "oauth_token"])
@pytest.mark.parametrize(("others", "how"), [(MANY, "2 keys name several people"), (OUTSIDE, "lets other machines in")])
async def test_others_are_refused_on_a_subscription_with_the_reason_and_what_is_right(
    teller: Path, method: str, others: dict[str, Any], how: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        await refuse_others(with_login(teller, method, **others))
    said = refused.value.message
    for words in (how, "subscription", TERMS, "ANTHROPIC_API_KEY", "Bedrock, Vertex or Foundry", "i_am_the_only_user"):
        assert words in said


@pytest.mark.parametrize("method", ["api_key", "api_key_helper", "third_party"])
@pytest.mark.parametrize("others", [MANY, OUTSIDE])
async def test_others_are_served_where_the_cli_pays_by_use(teller: Path, method: str, others: dict[str, Any]) -> None:
    await refuse_others(with_login(teller, method, **others))
    assert (teller.parent / "asked").exists()


@pytest.mark.parametrize("others", [MANY, OUTSIDE])
async def test_ones_own_devices_are_served_where_that_is_said(teller: Path, others: dict[str, Any]) -> None:
    await refuse_others(with_login(teller, "claude.ai", i_am_the_only_user=True, **others))


@pytest.mark.parametrize(
    "alone", [{}, {"host": "localhost"}, {"host": "::1"}, {"make_key": True}, {"keys": ONE}, {"uds": Path("s")}]
)
async def test_a_person_alone_is_never_refused_and_the_cli_is_not_even_asked(
    teller: Path, alone: dict[str, Any]
) -> None:
    await refuse_others(with_login(teller, "claude.ai", **alone))
    assert not (teller.parent / "asked").exists()


async def test_a_profile_with_a_login_of_its_own_is_a_subscription_too(teller: Path) -> None:
    profiles = {"work": Profile(login_env="WORK_LOGIN")}
    with pytest.raises(ConfigError, match="subscription"):
        await refuse_others(with_login(teller, "api_key", profiles=profiles, **MANY))
    alone = with_login(teller, "api_key", profiles=profiles)
    await refuse_others(alone)
    assert [line async for line in report(alone, Keys(alone)) if "WORK_LOGIN, which is not set" in line]


async def test_a_made_key_beside_a_named_one_is_a_second_person(teller: Path) -> None:
    with pytest.raises(ConfigError, match="2 keys name several people"):
        await refuse_others(with_login(teller, "claude.ai", keys=ONE, make_key=True))


@pytest.mark.parametrize("method", ["none", None, "something new"])
async def test_a_login_that_nobody_can_tell_is_not_refused(teller: Path, method: str | None) -> None:
    await refuse_others(with_login(teller, method, **MANY))


async def test_the_real_cli_calls_a_token_of_a_subscription_one_and_a_key_none(tmp_path: Path, claude_2: Path) -> None:
    def settings(**env: str) -> Settings:
        env |= {"ANTHROPIC_BASE_URL": "http://127.0.0.1:9", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        place: dict[str, Any] = {
            "var": tmp_path / "var",
            "claude_bin": claude_2,
            "claude_config_dir": tmp_path / "config",
        }
        return Settings(**place, claude_env=env, **MANY)

    with pytest.raises(ConfigError, match="subscription"):
        await refuse_others(settings(CLAUDE_CODE_OAUTH_TOKEN="sk-ant-oat01-fake"))
    await refuse_others(settings(ANTHROPIC_API_KEY=FAKE_KEY))
    await refuse_others(settings())
