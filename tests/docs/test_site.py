"""`make docs`: every page is in the site, and no link leads nowhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from ..conftest import ROOT


def built(site: Path, source: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=source,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, timeout=100,
    )  # fmt: skip


def test_the_site_is_built_of_the_documents_as_they_are(tmp_path: Path) -> None:
    done = built(tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    first = (tmp_path / "site" / "index.html").read_text()
    assert 'href="self-hosting/' in first
    assert (tmp_path / "site" / "deploy" / "haproxy.cfg").is_file()


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    source = tmp_path / "checkout"
    (source / "docs").mkdir(parents=True)
    (source / "deploy").mkdir()
    (source / "deploy" / "there.cfg").touch()
    (source / "docs" / "hooks.py").write_text((ROOT / "docs" / "hooks.py").read_text())
    config = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    (source / "mkdocs.yml").write_text(config)
    (source / "README.md").write_text("# First\n\n[1](docs/page.md#there) [2](docs/page.md#elsewhere) [3](gone.md)\n")
    (source / "docs" / "page.md").write_text(
        "# Page\n\n## There\n\n[4](../deploy/gone.cfg) [5](../README.md)\n[6](../deploy/there.cfg) [7](../deploy)\n"
    )
    done = built(tmp_path / "site", source)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert done.stdout.count("WARNING") + done.stderr.count("WARNING") == 3
    assert all(place in said for place in ("#elsewhere", "'gone.md'", "'deploy/gone.cfg'"))


def test_the_readme_says_what_was_measured_of_continuity() -> None:
    measured = re.findall(r"CLI 2\.1 (\d+ of \d+)", (ROOT / "docs" / "continuity.md").read_text())
    assert len(measured) == 2
    assert [f"**{one}**" for one in measured] == re.findall(r"\*\*\d+ of \d+\*\*", (ROOT / "README.md").read_text())
