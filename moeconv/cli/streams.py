"""What happens when nobody can read what is printed?"""

from __future__ import annotations

import io
import os
import sys

from moeconv.errors import OutputError


class Stream(io.TextIOWrapper):
    """A standard stream: lost data is an `OutputError`, lost messages end no conversion.

    A reader that has enough (`| head`) is left to the libraries, which end quietly.
    """

    def write(self, text: str) -> int:
        """Write a text; what the terminal cannot show becomes `?`."""
        if text == "":
            return 0  # typer's question whether the stream takes text, which must not use it up
        try:
            return super().write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        """Write what is held back."""
        try:
            super().flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        is_data = self.fileno() == 1
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), self.fileno())
        if isinstance(error, BrokenPipeError) and is_data:
            raise error
        if is_data:
            message = f"stdout cannot be written: {error.strerror}"
            raise OutputError(message) from error


def take_over() -> None:
    """Put `Stream` in the place of stdout and stderr; a closed stderr is as good as one to nowhere.

    Raises
    ------
    OutputError
        Stdout is closed: what is asked for could be given to nobody.
    """
    if getattr(sys, "stderr", None) is None:  # else a file of ours would get its number
        nowhere = os.open(os.devnull, os.O_WRONLY)
        sys.stderr = os.fdopen(nowhere, "w", encoding="utf-8")
    if getattr(sys, "stdout", None) is None:
        message = "stdout is closed"
        raise OutputError(message, hint="send it to a file, or to `/dev/null`")
    if not os.environ.get("COLUMNS", "").strip("0"):
        os.environ.pop("COLUMNS", None)  # a line of no columns would show nothing
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            made = Stream(
                stream.buffer,
                stream.encoding,
                "replace",
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, made)
