"""The pictures: a ratio by concurrency, a panel for each temperature and length of prompt."""

from collections.abc import Sequence

from matplotlib.ticker import FixedLocator

from vllm_triforce_bench.bench.figures import tokens_text, values
from vllm_triforce_bench.bench.serve.settings import CONTROL, TRIFORCE
from vllm_triforce_bench.bench.style import FAINT, colour_of, marker_of, plt, styled, to_svg

_OTHERS = ("triforce:level1", "triforce:retrieval", "triforce:streaming", "draft_model")
"""Whose colours other checkouts take."""


def ratio(rows: Sequence[dict], metric: str, axis_title: str, name: str) -> str:
    """Points are medians over pairs, bars go from the least to the greatest."""
    inputs, temperatures = values(rows, "input_len"), values(rows, "temperature")
    concurrencies = values(rows, "concurrency")
    contests = list(dict.fromkeys(row["contest"] for row in rows))
    with styled():
        figure, axes = plt.subplots(
            len(inputs),
            len(temperatures),
            figsize=(
                max(6.6, (0.8 * len(concurrencies) + 1.6) * len(temperatures)),
                2.6 * len(inputs) + 0.4,
            ),
            sharex=True,
            sharey=True,
            squeeze=False,
        )
        for y, input_len in enumerate(inputs):
            for x, temperature in enumerate(temperatures):
                axis = axes[y][x]
                axis.axhline(1, color=FAINT, linewidth=1.2, linestyle=(0, (4, 3)))
                here = [
                    row
                    for row in rows
                    if (row["input_len"], row["temperature"]) == (input_len, temperature)
                ]
                for i, contest in enumerate(contests):
                    found = [row for row in here if row["contest"] == contest]
                    offset = (i - (len(contests) - 1) / 2) * 0.1
                    _draw(axis, found, metric, concurrencies, offset, contests)
                axis.set_title(f"{tokens_text(input_len)} tokens, T={temperature:g}")
                axis.xaxis.set_major_locator(FixedLocator(range(len(concurrencies))))
                axis.set_xticklabels([str(number) for number in concurrencies])
                axis.set_xlim(-0.5, len(concurrencies) - 0.5)
                axis.grid(axis="x", visible=False)
                axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
            axes[y][0].set_ylabel(axis_title)
        for axis in axes[-1]:
            axis.set_xlabel("requests under way")
        figure.tight_layout()
        named: dict = {}
        for axis in axes.flat:
            handles, names = axis.get_legend_handles_labels()
            named |= dict(zip(names, handles))
        figure.legend(
            list(named.values()),
            list(named),
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=min(3, max(1, len(named))),
        )
        return to_svg(figure, name, f"{axis_title} by concurrency, temperature and prompt length")


def _draw(axis, found, metric: str, concurrencies: list, offset: float, contests: list) -> None:
    """One contest's points; a cell that came more than once has a point each time."""
    if not found:
        return
    found = sorted(found, key=lambda row: (row["concurrency"], row["cell_index"]))
    middle = [row[f"{metric}_ratio"] for row in found]
    axis.errorbar(
        [concurrencies.index(row["concurrency"]) + offset for row in found],
        middle,
        yerr=[
            [row[f"{metric}_ratio"] - row[f"{metric}_ratio_min"] for row in found],
            [row[f"{metric}_ratio_max"] - row[f"{metric}_ratio"] for row in found],
        ],
        label=f"{found[0]['challenger']} / {found[0]['baseline']}",
        color=_colour(found[0], contests),
        marker=marker_of(contests.index(found[0]["contest"])),
        markersize=5.5,
        linewidth=1.8,
        elinewidth=1.1,
        capsize=2.5,
        alpha=0.95,
    )


def _colour(row: dict, contests: list[str]) -> str:
    if row["challenger_name"] == CONTROL:
        return colour_of("stock")
    if row["contest"] == f"{TRIFORCE}/stock":
        return colour_of("triforce")
    return colour_of(_OTHERS[contests.index(row["contest"]) % len(_OTHERS)])
