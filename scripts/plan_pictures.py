"""The docs' picture of where a GPT's parameters are.

    python scripts/plan_pictures.py [FOLDER]

It is drawn from the formula that the planner counts with.
"""

import sys
from pathlib import Path

from meshtune.report.plan_plots import parameters_picture


def main(folder: str = "docs/images") -> None:
    print(parameters_picture(Path(folder, "plan-parameters.svg")))


if __name__ == "__main__":
    main(*sys.argv[1:])
