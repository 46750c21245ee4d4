"""What a suite tried, how often, and with what result: a row of the page on reliability.

`MOECONV_RECORD=docs/figures/reliability.json pytest -m "slow or nightly"` replaces the rows of the
suites that run and pass; a suite that fails leaves none.
"""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path


def add_row(path: Path, what: str, tried: int, result: str) -> None:
    """Put a row in the place of the one that tells of the same."""
    rows = json.loads(path.read_text()) if path.exists() else {}
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    rows[what] = {"tried": tried, "result": result, "date": today}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
