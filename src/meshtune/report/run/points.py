"""Points that rows add to a run's curves once these are drawn, so that a page which stays open continues."""

from collections import deque
from collections.abc import Sequence
from statistics import fmean

from meshtune.report.draw.kinds import Lines, Panel
from meshtune.report.run.panels import Curve
from meshtune.rundir import Row

Point = dict[str, float]  # "x": step, "y0": value of a panel's first curve …


class Points:
    """The curves of a page, as they continue."""

    def __init__(self, panels: Sequence[Panel]) -> None:
        drawn = [panel for panel in panels if isinstance(panel, Lines)]
        self._curves = [
            (panel.key, f"y{place}", curve, deque(curve.last, len(curve.last) or 1))
            for panel in drawn
            for place, curve in enumerate(panel.series)
            if isinstance(curve, Curve)
        ]
        self.end = max((panel.x_end or 0 for panel in drawn), default=0)  # last step

    def of(self, rows: Sequence[Row]) -> dict[str, list[Point]]:
        """Points that rows add, by panel; `end` moves to their last step. Each row is given once, in order;
        steps that a curve was drawn with add nothing to it.
        """
        added: dict[str, dict[int, Point]] = {}
        for row in rows:
            for key, field, curve, last in self._curves:
                value = row.get(curve.column) if row.get("kind") == curve.kind else None
                if value is None or row["step"] <= (curve.x[-1] if curve.x else -1):
                    continue
                value /= curve.per
                if curve.last:
                    last.append(value)
                    value = fmean(last)
                point = added.setdefault(key, {}).setdefault(row["step"], {"x": row["step"]})
                point[field] = float(f"{value:.6g}")
                self.end = max(self.end, row["step"])
        return {key: [*points.values()] for key, points in added.items()}
