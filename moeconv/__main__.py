"""The command: `moeconv`, and `python -m moeconv`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; Ctrl-C ends it in words, while it is still being imported too."""
    try:
        from moeconv.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
