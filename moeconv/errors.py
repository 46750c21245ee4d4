"""What went wrong, and what to do next.

The whole tree:

    MoeconvError          exit 1
    ├── SourceError       exit 3   the source cannot be read as it is
    ├── UnsupportedError  exit 4   the source is sound, but this target cannot hold it
    ├── OutputError       exit 5   the output directory cannot be written or is somebody else's
    └── VerifyError       exit 6   converted bytes are not what they should be

A message says what, where (in backticks), what was expected and what was found; the hint says
what to do. Anything that is not a `MoeconvError` is a bug and keeps its traceback.
"""

from __future__ import annotations

from typing import ClassVar


class MoeconvError(Exception):
    """An error that a person can act on.

    Parameters
    ----------
    message
        What, where, expected, found; lower case, no full stop.
    hint
        The next thing to do, if there is one.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")  # where an engine shows the traceback


class SourceError(MoeconvError):
    """The source checkpoint is missing, broken or contradicts itself."""

    exit_code: ClassVar[int] = 3


class UnsupportedError(MoeconvError):
    """The source is sound, but the wanted target cannot hold it."""

    exit_code: ClassVar[int] = 4


class OutputError(MoeconvError):
    """The output directory cannot be written, or holds another plan."""

    exit_code: ClassVar[int] = 5


class VerifyError(MoeconvError):
    """Converted bytes, or the files that hold them, are not what the manifest says."""

    exit_code: ClassVar[int] = 6
