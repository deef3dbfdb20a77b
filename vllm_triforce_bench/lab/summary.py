"""Tables of the lab, from the rows of single replays."""

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from vllm_triforce_bench.lab.settings import VARIED

MEASURES = {
    "greedy_agreement": "greedy agreement",
    "acceptance": "acceptance",
    "kept_mass": "attention kept",
}
_LABELS = {
    "budget": "budget, tokens",
    "depth": "context, tokens",
    "chunk": "chunk size, tokens",
    "recent": "recent tokens",
    "refresh": "refresh interval, full passes",
}


@dataclass(frozen=True)
class Table:
    """One experiment, at one budget unless it varies the budget.

    Args:
        label: name of the varied value.
        figures: mean, min, max and count over the stretches of each measure, by policy and varied
            value.
    """

    experiment: str
    budget: int | None
    label: str
    figures: pd.DataFrame

    @property
    def name(self) -> str:
        return self.experiment if self.budget is None else f"{self.experiment}-{self.budget}"

    @property
    def title(self) -> str:
        at = "" if self.budget is None else f", budget {self.budget}"
        return f"By {self.label}{at}"

    @property
    def policies(self) -> list[str]:
        return list(self.figures.index.unique(0))

    @property
    def values(self) -> list[int]:
        return sorted(self.figures.index.unique(1))

    def lines(self) -> Iterator[list[str]]:
        """Yield a policy, a measure, and the cells of each measure's line."""
        for policy in self.policies:
            for measure, name in MEASURES.items():
                # A column a value; a policy may lack some.
                part = self.figures.loc[policy][measure].reindex(self.values)
                yield [policy, name, *(_cell(*row) for row in part.itertuples(index=False))]


def _cell(mean: float, low: float, high: float, count: float) -> str:
    """Format the mean over stretches, plus or minus half the range if there are several."""
    if mean != mean:
        return ""
    return f"{mean:.3f}" if count == 1 else f"{mean:.3f} ±{(high - low) / 2:.3f}"


def tables(rows: pd.DataFrame) -> list[Table]:
    """Make all tables of a run."""
    run_tables = []
    for experiment, column in VARIED.items():
        part = rows[rows["experiment"] == experiment]
        # By one budget each, but for the experiment that varies it.
        groups = [(None, part)] if column == "budget" else part.groupby("budget")
        for budget, chosen in groups:
            if not chosen.empty:
                by = chosen.groupby(["policy", column], sort=False)[list(MEASURES)]
                figures = by.agg(["mean", "min", "max", "count"])
                run_tables.append(Table(experiment, budget, _LABELS[experiment], figures))
    return run_tables
