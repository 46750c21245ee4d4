"""Are the generated pages current, and do links and quoted refusals hold?"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_generated_pages_are_current():
    command = [sys.executable, "docs/generate.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE) if anchor else []
        slugs = {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}
        assert not anchor or anchor in slugs, target


def test_refusals_in_the_how_to_are_those_of_the_code():
    """Each is quoted up to its values (`…`); the pieces must stand in the code, in this order."""
    code = "\n".join(path.read_text() for path in sorted((ROOT / "moeconv").rglob("*.py")))
    code = re.sub(r'"\n\s*f?"', "", code)  # strings that go on in the next line
    page = (ROOT / "docs/how-to/when-it-refuses.md").read_text()
    quoted = re.findall(r"^\| “(.+?)” \|", page, re.MULTILINE)
    assert len(quoted) > 40
    for text in quoted:
        pieces = [re.escape(piece.strip()) for piece in text.split("…") if piece.strip()]
        assert re.search(r"[^\n]{0,160}?".join(pieces), code), text
