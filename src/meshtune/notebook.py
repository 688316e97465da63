"""How Python's values show themselves in a notebook: a line, a part of their page, a table, a picture.

    plan(), its choice, dryrun(), sweep(), train()  ─>  report/notebook.py: Document, rows

Their classes stand below the reports, which are imported by name where a value is shown.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from meshtune.errors import UserError

if TYPE_CHECKING:
    import pandas

REPORTS = "meshtune.report.notebook"


class Notebook:
    """A value that notebooks show. Its class is one of those in `document` of REPORTS."""

    @property
    def summary_line(self) -> str:
        """The value in one line."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.summary_line}>"

    def _repr_html_(self) -> str:
        return importlib.import_module(REPORTS).part_of(self)

    @property
    def table(self) -> pandas.DataFrame:
        """Its numbers as docs/python.md lists them, in bytes and seconds. Raises UserError without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise UserError(
                "`.table` is a DataFrame, and pandas can't be imported; install it with: pip install pandas"
            ) from error
        return pandas.json_normalize([*importlib.import_module(REPORTS).rows(self)])

    def plot(self, path: str | os.PathLike[str] | None = None, *, width: str | None = None) -> Any:
        """Its pictures in one, which a notebook shows. path: where to write them as well: a .png, .svg or
        .pdf file, a folder, or a .html file for the whole page. width: of pictures that are written, such as
        84mm. Raises UserError for another one, and where nothing can be drawn.
        """
        return importlib.import_module(REPORTS).picture(self, path, width)
