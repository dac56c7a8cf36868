"""The page's script: its modules joined into one file. A browser asks once, and knows at once all that it needs.

A module becomes a function that returns what it exports, and an import takes it from there: names stay apart. The
browser is given no address but the one file's, so `script-src 'self'` and nothing inline are enough.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# The only forms that the modules use: named imports of each other on one line, exported declarations.
_IMPORT = re.compile(r'^import \{ (.+) \} from "\./(\w+)\.js";(?: //.*)?$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


def joined(modules: Mapping[str, str], entry: str) -> str:
    """The module `entry` behind all that it imports, each once. Raises `ValueError` where they import in a circle."""
    written: dict[str, str] = {}

    def write(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise ValueError(f"{' → '.join((*above, name))}: modules that import in a circle cannot be joined")
        if name in written:
            return
        source = modules[name]
        for found in _IMPORT.finditer(source):
            write(found[2], (*above, name))
        body = _IMPORT.sub(r"const { \1 } = from_\2;", source)
        exported = ", ".join(_EXPORT.findall(body))
        body = _EXPORT.sub("", body)
        if name != entry:  # the last one waits at its top level, which no function could
            body = f"const from_{name} = (() => {{\n{body}return {{ {exported} }};\n}})();\n"
        written[name] = f"// --- {name}.js\n{body}"

    write(entry, ())
    return "".join(written.values())
