"""The page's script: its modules joined into one file, which a browser loads with one request.

Each module becomes a function that returns its exports, and an import reads them from there, so that module scopes stay
separate. The content security policy needs only `script-src 'self'`, and nothing inline.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# The only forms in our modules: named imports on one line, and exported declarations.
_IMPORT = re.compile(r'^import \{ (.+) \} from "\./(\w+)\.js";(?: //.*)?$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


def joined(modules: Mapping[str, str], entry: str) -> str:
    """All modules that `entry` imports, each once, then `entry`. Raises `ValueError` for circular imports."""
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
        if name != entry:  # it uses top-level await, which is not possible in a function
            body = f"const from_{name} = (() => {{\n{body}return {{ {exported} }};\n}})();\n"
        written[name] = f"// --- {name}.js\n{body}"

    write(entry, ())
    return "".join(written.values())
