"""Writes docs/settings.md from the settings themselves: `python -m service.cli.reference > docs/settings.md`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from service.config import ENV_PREFIX, LIMITS, Settings

_INT32_MAX = 2**31 - 1

_HEAD = """\
# Settings

Made from the code by `python -m service.cli.reference`.

`slotwire serve` takes each setting from the command line, else from the environment, else from a TOML file
(`--config FILE` or `{prefix}CONFIG`), else its default. In the file a setting stands at the top or in the table of its
group, under its name:

```toml
[context]
slots = 8
cache_type_k = "q8_0"
```

A setting that is true or false has a switch to turn it off, such as `--no-mmap`. A list is given by repeating the
option, as a JSON list in the environment, and as an array in the file.
"""


def reference() -> str:
    """The page as Markdown."""
    groups = get_type_hints(Settings)
    return "\n".join([_HEAD.format(prefix=ENV_PREFIX), *(_group(name, kind) for name, kind in groups.items())])


def _group(name: str, kind: type) -> str:
    lines = [
        f"## {name.capitalize()}",
        "",
        f"Table `[{name}]`. {_summary(kind)}",
        "",
        "| option | environment | value | default | meaning |",
        "|---|---|---|---|---|",
    ]
    hints = get_type_hints(kind)
    meanings = dict(_meanings(kind))
    default = kind()
    for item in fields(kind):
        option = "--" + item.name.replace("_", "-")
        value = _value(item.name, hints[item.name])
        cells = (f"`{option}`", f"`{ENV_PREFIX}{item.name.upper()}`", value, _shown(getattr(default, item.name)))
        lines.append("| " + " | ".join((*cells, meanings[item.name])) + " |")
    return "\n".join([*lines, ""])


def _summary(kind: type) -> str:
    return (kind.__doc__ or "").strip().partition("\n")[0]


def _meanings(kind: type) -> Iterator[tuple[str, str]]:
    for match in re.finditer(r"^ {8}(\w+): (.+)$", kind.__doc__ or "", re.MULTILINE):
        yield match[1], match[2].replace("|", "\\|")


def _value(name: str, hint: Any) -> str:
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if get_origin(hint) is tuple:
        return "list"
    if hint is bool:
        return "true or false"
    if name in LIMITS:
        low, high = LIMITS[name]
        if high < _INT32_MAX:
            return f"{low:,g} to {high:,g}"
        return f"at least {low:,g}" if low > -float("inf") else "a number"
    return "path" if Path in (hint, *get_args(hint)) else "text"


def _shown(value: object) -> str:
    if value is None or value == ():
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(reference(), end="")
