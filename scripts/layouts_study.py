"""The study of 4,608 layouts on H100s, predicted: `make study-layouts`.

python scripts/layouts_study.py --out FOLDER [--picture docs/images/best-layouts.svg]

examples/sweeps/layouts-h100.yaml ─> meshtune sweep --simulate ─> sweep.db ─> report.html, the heat map
"""

import argparse
import resource
import subprocess
import sys
from pathlib import Path

from meshtune.report.draw.picture import write
from meshtune.report.experiments.database import DATABASE
from meshtune.report.experiments.page import sweep_page

SWEEP = Path(__file__).parents[1] / "examples" / "sweeps" / "layouts-h100.yaml"
HEAT_MAP = "best_layouts"  # key of the panel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--picture", type=Path, help="where the heat map goes; default: none is written")
    options = parser.parse_args()
    words = [sys.executable, "-m", "meshtune"]
    subprocess.run([*words, "sweep", str(SWEEP), "--simulate", "--out", str(options.out)], check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"Predicted in {used.ru_utime + used.ru_stime:.0f} CPU s.")
    subprocess.run([*words, "report", str(options.out)], check=True)
    if options.picture:
        page = sweep_page(options.out / DATABASE)
        panels = [panel for panel in page.panels if panel.key == HEAT_MAP]
        write(options.picture, [panels], title=page.name, width=1060)


if __name__ == "__main__":
    main()
