"""A figure for each table: greedy agreement, acceptance and kept attention by what was varied."""

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from vllm_triforce_bench.lab.settings import LabSettings
from vllm_triforce_bench.lab.summary import Table

# Colours that stay apart for colour-blind readers (Okabe and Ito).
_LOOK = {
    "topk": ("#000000", "s", "exact top-k (ceiling)"),
    "retrieval": ("#0072B2", "o", "retrieval (TriForce)"),
    "h2o": ("#E69F00", "^", "H2O"),
    "streaming": ("#D55E00", "v", "StreamingLLM"),
}


def draw(table: Table, settings: LabSettings) -> Figure:
    """One panel per measure, a line per policy, a band from the lowest to the highest stretch."""
    figure = Figure(figsize=(4.2 * len(table.measures), 3.7), layout="constrained")
    axes = figure.subplots(1, len(table.measures), squeeze=False)[0]
    for axis, (measure, name) in zip(axes, table.measures.items()):
        for policy in table.policies:
            colour, marker, label = _LOOK.get(policy, (None, "o", policy))
            part = table.figures.loc[policy][measure].sort_index()
            (line,) = axis.plot(part.index, part["mean"], color=colour, marker=marker, label=label)
            axis.fill_between(
                part.index, part["min"], part["max"], color=line.get_color(), alpha=0.12, lw=0
            )
        if table.full_hits is not None and measure == "answer_hits_sparse":
            axis.plot(
                table.full_hits.index, table.full_hits, color="grey", ls="--", label="full cache"
            )
            axis.legend(handles=axis.lines[-1:], fontsize=8)
        if measure == "acceptance":
            name = f"acceptance, T={settings.temperature:g}, top-p {settings.top_p:g}"
        axis.set_title(name, fontsize=11)
        axis.set_xlabel(table.label, fontsize=9)
        if table.experiment != "needle":
            axis.set_xscale("log", base=2)
        axis.xaxis.set_major_locator(FixedLocator(table.values))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(_tick))
        axis.tick_params(labelsize=8)
        axis.set_ylim(top=1.005)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8, loc="best")
    figure.suptitle(table.title, fontsize=12)
    return figure


def _tick(value: float, _) -> str:
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}K"
    return f"{value:g}"
