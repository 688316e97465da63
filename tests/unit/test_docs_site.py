"""The documentation as a site: every page, links out of docs/, and nothing that a network must bring."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOADED = re.compile(
    r'<(?:script|img|iframe)[^>]+src="(https?:[^"]+)|<link[^>]+stylesheet[^>]+href="(https?:[^"]+)'
)

pytestmark = [pytest.mark.all, pytest.mark.needs("mkdocs")]


def build(config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(config), "--site-dir", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_site_is_built_and_loads_nothing(tmp_path: Path) -> None:
    built = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert built.returncode == 0, built.stderr
    pages = {
        page.relative_to(tmp_path / "site"): page.read_text() for page in tmp_path.glob("site/**/*.html")
    }
    assert {Path(f"{page.stem}.html") for page in ROOT.glob("docs/*.md")} < pages.keys()
    assert [found for text in pages.values() for found in LOADED.findall(text)] == []
    assert 'href="validation/kills.html"' in pages[Path("reliability.html")]
    assert 'href="start.html"' in pages[Path("index.html")]
    assert "fonts.g" not in pages[Path("index.html")]


@pytest.mark.parametrize(
    "link", ["[x](no-such-page.md)", "[x](data.md#no-such-heading)", "[x](../no-such-file.py)"]
)
def test_a_wrong_link_fails_the_build(link: str, tmp_path: Path) -> None:
    text = (ROOT / "mkdocs.yml").read_text().replace("docs_dir: docs", f"docs_dir: {tmp_path / 'docs'}")
    (tmp_path / "mkdocs.yml").write_text(
        text.replace("scripts/docs_site.py", str(ROOT / "scripts" / "docs_site.py"))
    )
    (tmp_path / "docs").mkdir()
    for entry in (ROOT / "docs").iterdir():
        (tmp_path / "docs" / entry.name).symlink_to(entry)
    page = tmp_path / "docs" / "mfu.md"
    page.unlink()
    page.write_text(f"{link}\n\n" + (ROOT / "docs" / "mfu.md").read_text())
    built = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert built.returncode != 0
    assert "mfu.md" in built.stderr
