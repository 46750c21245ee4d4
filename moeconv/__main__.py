"""`python -m moeconv`."""

from __future__ import annotations

from moeconv.cli import main

if __name__ == "__main__":
    main()
