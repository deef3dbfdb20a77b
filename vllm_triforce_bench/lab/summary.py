"""Tables of the lab, from the rows of single replays."""

import math
from dataclasses import dataclass

import pandas as pd

MEASURES = {
    "greedy_agreement": "greedy agreement",
    "acceptance": "acceptance",
    "kept_mass": "attention kept",
}
NEEDLE_MEASURES = {
    **MEASURES,
    "answer_hits_sparse": "answer tokens hit",
}
_PARTS = ["mean", "min", "max", "count"]
# Varied column of each experiment, and its label.
VARIED = {
    "budget": ("budget", "budget, tokens"),
    "depth": ("context", "context, tokens"),
    "chunk": ("chunk_size", "chunk size, tokens"),
    "recent": ("recent_tokens", "recent tokens"),
    "refresh": ("refresh_interval", "refresh interval, full passes"),
    "needle": ("needle_depth", "depth of the needle, share of the text before it"),
}


@dataclass(frozen=True)
class Table:
    """One experiment, at one budget unless it varies the budget.

    Args:
        figures: mean, min, max and count over the stretches of each measure, by policy and varied
            value.
        full_hits: share of the answer that the full cache hits, by needle depth.
    """

    experiment: str
    budget: int | None
    label: str
    measures: dict[str, str]
    figures: pd.DataFrame
    full_hits: pd.Series | None = None

    @property
    def name(self) -> str:
        return self.experiment if self.budget is None else f"{self.experiment}-{self.budget}"

    @property
    def title(self) -> str:
        at = "" if self.budget is None else f", budget {self.budget}"
        return f"By {self.label}{at}"

    @property
    def policies(self) -> list[str]:
        return list(dict.fromkeys(self.figures.index.get_level_values(0)))

    @property
    def values(self) -> list:
        return sorted(set(self.figures.index.get_level_values(1)))

    def cell(self, policy: str, value, measure: str) -> str:
        """Format the mean over stretches, plus or minus half the range if there are several."""
        if (policy, value) not in self.figures.index:
            return ""
        mean, low, high, count = (
            self.figures.loc[(policy, value), (measure, part)] for part in _PARTS
        )
        if count == 1:
            return f"{mean:.3f}"
        return f"{mean:.3f} ±{(high - low) / 2:.3f}"


def tables(rows: pd.DataFrame) -> list[Table]:
    """Make all tables of a run."""
    run_tables = []
    for experiment in [name for name in VARIED if name in set(rows["experiment"])]:
        column, label = VARIED[experiment]
        measures = NEEDLE_MEASURES if experiment == "needle" else MEASURES
        part = rows[rows["experiment"] == experiment]
        budgets = [None] if experiment == "budget" else sorted(set(part["budget"]))
        for budget in budgets:
            chosen = part if budget is None else part[part["budget"] == budget]
            figures = chosen.groupby(["policy", column], sort=False)[list(measures)].agg(_PARTS)
            hits = None
            if experiment == "needle":
                hits = chosen.groupby(column)["answer_hits_full"].mean()
            run_tables.append(Table(experiment, budget, label, measures, figures, hits))
    return run_tables


def needle_answered(rows: pd.DataFrame) -> str | None:
    """Describe the answers of the full cache, to which the needle's figures are relative."""
    part = rows[rows["experiment"] == "needle"]
    if part.empty:
        return None
    once = part.drop_duplicates(["stretch", "needle_depth"])
    hits, probability = once["answer_hits_full"].mean(), once["answer_probability_full"]
    mean = math.exp(probability.clip(lower=1e-30).map(math.log).mean())
    return (
        f"With the full cache the target gives the answer's tokens a probability of {mean:.2f} "
        f"(geometric mean) and hits {hits:.0%} of them greedily."
    )
