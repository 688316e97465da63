"""Hooks of mkdocs.yml: pages of the repository outside docs/ join the site, and links to them are followed.

index.md is README.md and examples.md lists examples/; the others keep their path. A link is written as it
works in a clone (`../validation/kills.md`), and is rewritten to the page's place in the site.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
# Files beside docs/ that pages link to; those not in the navigation are reached by links.
OUTSIDE = (
    *("CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "LICENSE", "quickstart/README.md"),
    *("examples/*.yaml", "examples/sweeps/*.yaml", "examples/*.toml"),
    *("src/meshtune/plan/*.toml", "src/meshtune/plan/models.py"),
    *("src/meshtune/dryrun/*.toml", "src/meshtune/dryrun/allocator.py", "src/meshtune/dryrun/streams.py"),
    *("validation/*", "validation/data/*.md"),
    *("benchmarks/**/*.md", "benchmarks/results/*"),
)
LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)\s]*)?\))")
FOLDERS = {
    "examples": "examples.md",
    "examples/python": "examples.md",
}  # pages that stand for a folder; others have a README.md


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside docs/."""
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
    files.append(File.generated(config, "examples.md", content=examples()))
    for path in sorted({path for pattern in OUTSIDE for path in ROOT.glob(pattern) if path.is_file()}):
        name = path.relative_to(ROOT).as_posix()
        if name not in files.src_uris:
            added = File.generated(config, name, abs_src_path=str(path))
            added.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(added)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links between files of the repository to links between pages of the site."""
    here = page.file.src_uri
    source = {"index.md": "README.md"}.get(here, here if (ROOT / here).exists() else f"docs/{here}")

    def rewritten(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        if target in FOLDERS:
            target = FOLDERS[target]
        elif (ROOT / target).is_dir():
            target = f"{target}/README.md"
        place = "index.md" if target == "README.md" else target.removeprefix("docs/")
        return f"{link[1]}{posixpath.relpath(place, posixpath.dirname(here) or '.')}{link[3]}"

    return LINK.sub(rewritten, markdown)


def examples() -> str:
    """A page with the text of every example."""
    parts = ["# Examples\n\nA config file for each use, and scripts; all are in `examples/` of a clone.\n"]
    for path in sorted(ROOT.glob("examples/*.yaml")):
        text = path.read_text(encoding="utf-8").partition("\n")[2]  # without the line for editors
        parts.append(f"## {path.stem}\n\n```yaml\n{text}```\n")
    for path in sorted(ROOT.glob("examples/python/*.py")):
        parts.append(f"## python/{path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n")
    return "\n".join(parts)
