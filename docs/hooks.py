"""What `make docs` adds to mkdocs: the pages and files beside docs/ that a page links to are part of the site.

The README is the first page. Links are those of a checkout (`../deploy/haproxy.cfg`, `docs/ui/page.png`). Each is
changed to where that file is in the site, and mkdocs in strict mode finds every one that leads nowhere. A link to a
folder becomes plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
FIRST, DOCS = "README.md", "docs/"
# `[text](address)` and `[text](address#anchor)`, within the repository.
_LINK = re.compile(r"\[([^]\[]*)]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    left = [FIRST, *(f"{DOCS}{file.src_uri}" for file in files)]
    added = {FIRST}
    while left:
        path = left.pop()
        if not path.startswith(DOCS):
            files.append(File.generated(config, _in_site(path), abs_src_path=str(ROOT / path)))
        for target in _linked(path) if path.endswith(".md") else ():
            if not target.startswith(DOCS) and target not in added and (ROOT / target).is_file():
                added.add(target)
                left.append(target)
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Links as they are between the files of the site: relative to docs/, where the README is `index.md`."""
    here = page.file.src_uri
    source = FIRST if here == _in_site(FIRST) else here
    if (ROOT / DOCS / here).is_file():
        source = f"{DOCS}{here}"

    def turned(link: re.Match[str]) -> str:
        text, address, anchor = link[1], link[2], link[3] or ""
        target = _target(source, address)
        if (ROOT / target).is_dir():
            return text
        return f"[{text}]({'../' * here.count('/')}{_in_site(target)}{anchor})"

    return _LINK.sub(turned, markdown)


def _linked(path: str) -> Iterator[str]:
    for link in _LINK.finditer((ROOT / path).read_text()):
        yield _target(path, link[2])


def _target(source: str, address: str) -> str:
    """The path in the repository that a link of this file leads to, by the text alone."""
    parts: list[str] = []
    for part in (Path(source).parent / address).parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(parts)


def _in_site(path: str) -> str:
    return "index.md" if path == FIRST else path.removeprefix(DOCS)
