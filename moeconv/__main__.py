"""The command: `moeconv`, and `python -m moeconv`."""

from __future__ import annotations

import contextlib
import os


def main() -> None:
    """Run the command line; Ctrl-C ends it in words, while it is still being imported too."""
    try:
        from moeconv.cli import main as run

        run()
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            os.write(2, b"interrupted\n")
        os._exit(130)  # half imported, there is nothing to tidy up


if __name__ == "__main__":
    main()
