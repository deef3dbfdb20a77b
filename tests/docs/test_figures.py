"""Promise: the front page, its pictures and the stored results say the same.

Pictures are compared byte for byte where matplotlib is the version that drew them; other versions
lay text out differently, so elsewhere the hash of the results in each picture is compared.
"""

import json
import re
from itertools import chain

import pytest

from tests.models import ROOT

pytest.importorskip("matplotlib", reason="pip install '.[bench]'")

from benchmarks.figures import draw, measure, pages, stored
from vllm_triforce_bench.bench.methods import STOCK

FRONT_PAGE = ROOT / "README.md"
MOST_LINES = 80
RATIO = re.compile(r"\b\d+\.\d+(?=x)")


@pytest.mark.parametrize("name", stored.NAMES)
def test_pictures_show_the_stored_results(name):
    drawn = draw.draw(name)
    for palette, text in drawn.items():
        there = (stored.FOLDER / f"{name}-{palette}.svg").read_text()
        remedy = f"{name}-{palette}.svg is out of date: run python -m benchmarks.figures draw"
        if draw.mark(stored.read(name)) in there:
            assert there == text, remedy
        else:
            assert stored.fingerprint(stored.read(name)) in there, remedy
    assert drawn["light"] != drawn["dark"]


def test_pages_show_the_stored_results():
    for page, text in pages.all_pages().items():
        assert page.read_text() == text, f"{page.name}: run python -m benchmarks.figures draw"


@pytest.mark.parametrize("name", stored.NAMES)
def test_each_result_has_an_origin(name):
    results = stored.read(name)
    for run in results["runs"].values():
        assert all(run[key] for key in ("command", "commit", "date", "processor", "versions"))
    assert {row["run"] for row in results["rows"]} == set(results["runs"])


def test_every_picture_is_shown_light_and_dark():
    shown = "".join(page.read_text() for page in [FRONT_PAGE, *(ROOT / "docs").glob("*.md")])
    for name in stored.NAMES:
        assert f"figures/{name}-light.svg" in shown and f"figures/{name}-dark.svg" in shown
        assert f"figures/{name}.json" in shown


def test_the_front_page_is_short_and_its_figures_are_published():
    text = FRONT_PAGE.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    answers = chain.from_iterable(row["ratios"] for row in stored.read("front")["rows"])
    published = {f"{ratio:.2f}" for ratio in answers}
    published |= set(RATIO.findall((ROOT / "docs" / "results.md").read_text()))
    assert set(RATIO.findall(text)) <= published


def test_a_benchmarks_folder_is_condensed(tmp_path):
    """Each answer stays; a run that measured less than it was started for is refused."""
    cells = [("float32", 512, t) for t in (0.0, 1.0)]
    records = [
        {
            **dict(zip(("dtype", "context", "temperature"), cell)),
            **{"batch_size": 1, "group": 0, "repetition": repetition, "num_paired": 2},
            **{"method": method, "budget": None, "label": method},
            "decode_tokens_per_second": speed + repetition,
            "greedy": None,
        }
        for cell in cells
        for repetition in (0, 1)
        for method, speed in ((STOCK, 10.0), ("triforce", 21.0))
    ]
    settings = {"dtypes": ["float32"], "contexts": [512], "temperatures": [0, 1]}
    settings |= {"repetitions": 2, "methods": [STOCK, "triforce"]}
    environment = dict.fromkeys(("commit", "vLLM", "torch", "Python", "device", "cores"), "1")
    environment["date"] = "28 November 2026, 09:38 UTC"
    content = {"environment": environment, "settings": settings}
    (tmp_path / "results.json").write_text(json.dumps(content))
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / measure.MEASUREMENTS).write_text(lines)
    results = measure.condense(tmp_path)
    assert [row["ratios"] for row in results["rows"]] == [[2.1, 2.0]] * 2
    assert results["rows"][0]["stock_tokens_per_second"] == [10, 11]
    assert results["runs"]["bench"]["date"] == "28 November 2026"
    (tmp_path / measure.MEASUREMENTS).write_text("".join(lines.splitlines(True)[:-2]))
    with pytest.raises(measure.Incomplete):
        measure.condense(tmp_path)
