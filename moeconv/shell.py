"""How is a name typed at a shell, so that a printed command can be copied and run as it is?"""

from __future__ import annotations

import os
import shlex


def typed(name: object) -> str:
    """Return a path, or another argument, as a POSIX shell takes it: one word in one line.

    What begins with `-` is named below `./`, or it would be taken for an option.
    """
    text = str(name)
    if text.startswith("-"):
        text = f"./{text}"
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_escaped, text)) + "'"  # a line break in quotes would end the line


def _escaped(char: str) -> str:
    if char.isprintable() and char not in "'\\":
        return char
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))
