"""Rows of single replays brought together: the tables that are shown, written and drawn."""

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
# What each experiment varies.
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
    """One experiment, at one budget where the budget is not what it varies."""

    experiment: str
    budget: int | None
    column: str
    label: str
    measures: dict[str, str]
    figures: pd.DataFrame
    """Indexed by policy and the varied value; for each measure its mean, min and max over the
    stretches, and their count."""
    full_hits: pd.Series | None = None
    """By needle depth, the share of the answer that the full cache itself hits."""

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
        """Mean over the stretches, plus or minus half the distance of the extremes if several."""
        if (policy, value) not in self.figures.index:
            return ""
        mean, low, high, count = (
            self.figures.loc[(policy, value), (measure, part)] for part in _PARTS
        )
        if count == 1:
            return f"{mean:.3f}"
        return f"{mean:.3f} ±{(high - low) / 2:.3f}"


def tables(rows: pd.DataFrame) -> list[Table]:
    """All tables of a run, in the order in which its rows name them."""
    found = []
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
            found.append(Table(experiment, budget, column, label, measures, figures, hits))
    return found


def needle_found(rows: pd.DataFrame) -> str | None:
    """How well the full cache itself answers: what the needle's figures are worth."""
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
