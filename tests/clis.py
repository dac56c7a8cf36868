"""With which CLIs a test runs, where not with both (the fixture `claude`)."""

from __future__ import annotations

import pytest

# For what is not about how the old CLI differs. It serves one turn a process, so each turn takes seconds of a processor
# there. The tests of its own ways, and a row of every breakage, run with it each time; these in `make full`.
old_cli_in_full = pytest.mark.parametrize(
    "claude", ["claude_2", pytest.param("claude_1", marks=pytest.mark.full)], indirect=True
)
