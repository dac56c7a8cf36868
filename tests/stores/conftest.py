from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .words import Words


@pytest.fixture
async def words(tmp_path: Path) -> AsyncIterator[Words]:
    words = Words(tmp_path / "words.sqlite3")
    await words.open()
    yield words
    await words.db.close()
