"""Promise: what the benchmark says is what it measured."""

import argparse
import json
import re
from dataclasses import asdict, replace
from types import SimpleNamespace as Thing

import pytest

from vllm_triforce import cli
from vllm_triforce_bench import colours
from vllm_triforce_bench.bench import (
    batch,
    batch_report,
    command,
    grid,
    measurement,
    methods,
    prompts,
    report,
)
from vllm_triforce_bench.bench import settings as settings_module
from vllm_triforce_bench.bench.engines import Decoded, _check_budget
from vllm_triforce_bench.bench.settings import EACH, Settings
from vllm_triforce_bench.options import BadInput


def read(line: str) -> Settings:
    """Settings of a command line."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return settings_module.read(parser.parse_args(line.split()))


def asked(**more) -> Settings:
    """Settings of a small run, but for these."""
    line = "--target a/model --methods stock --contexts 300 --tokens 16 --repetitions 1 "
    return replace(read(line + "--budgets 128 --dtypes float32 --dataset-name random"), **more)


def record(tokens_per_second, *, method="stock", group=0, repetition=0, temperature=0.0, **more):
    triforce = method == "triforce"
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    speculation = dict(zip(names, (4, 8, 6, [4, 2]) if triforce else (0, 0, 0, [])))
    levels = dict(num_level1_drafted=10, num_level1_accepted=5, num_level3_rejections=2)
    levels |= dict(num_level2_drafted=8, num_level2_accepted=6)
    levels |= dict(time_seconds={"level 1": 0.1, "level 2": 0.3})
    cell = dict(dtype="float32", context=300, batch_size=1, temperature=temperature)
    cell |= dict(group=group, repetition=repetition, num_paired=2)
    title = methods.METHODS[method].title
    engine = dict(method=method, budget=128 if triforce else None, label=title, greedy=None)
    engine |= dict(levels=levels if triforce else None, memory_bytes=3 << 20)
    times = dict(decode_tokens_per_second=tokens_per_second, time_to_first_token_s=[0.5])
    times |= dict(inter_token_latency_s=[0.010, 0.020, 0.030], seconds=1.0)
    counts = dict(num_tokens=10, num_steps=5, speculation=speculation)
    return cell | engine | times | counts | more


# The grid.


def test_every_method_comes_first_in_turn_and_stock_is_in_every_group():
    assert [grid.rotated("abc", turn)[0] for turn in range(4)] == ["a", "b", "c", "a"]
    names = ["stock", "ngram", "draft_model", "triforce"]
    variants = methods.variants(names, [1024, 2048], "TARGET", "DRAFT", {})
    groups = grid.groups(variants, engines_at_once=3)
    assert [[v.label for v in group] for group in groups] == [
        ["stock vLLM", "stock ngram", "stock draft_model"],
        ["stock vLLM", "TriForce, budget 1024", "TriForce, budget 2048"],
    ]


def test_engines_that_are_alone_are_compared_with_stocks_first_group():
    names = ["stock", "ngram", "triforce"]
    variants = methods.variants(names, [None], "TARGET", "DRAFT", {})
    assert grid.groups(variants, engines_at_once=1) == [[variant] for variant in variants]
    alone = [record(10, num_paired=1), record(30, method="triforce", group=2, num_paired=1)]
    alone += [record(7, method="ngram", group=1, num_paired=1, context=500)]  # stock is not there
    rows = {row["method"]: row for row in batch_report.summarize(alone)}
    assert rows.keys() == {"stock", "triforce"} and rows["triforce"]["ratio"] == 3


def test_no_figure_stands_under_a_budget_that_was_not_used():
    variant = methods.Variant("triforce", 256, {"method": "triforce"}, "TriForce")
    config = Thing(cache_config=Thing(block_size=128))
    config.additional_config = {"triforce": {"retrieval_budget": 256}}
    _check_budget(variant, config)
    config.additional_config = {"triforce": {"retrieval_budget": 384}}
    with pytest.raises(BadInput, match=r"256 does not fit .* 128 tokens; use 384"):
        _check_budget(variant, config)


# Prompts.


def test_a_folder_is_its_texts_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.py").write_text("two")
    (tmp_path / "a.py").write_text("one")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00\x80")
    assert prompts.read_text(tmp_path) == "a.py\none\n\nb/x.py\ntwo"


FOUR_PROMPTS = asked(batch_sizes=[1, 2], repetitions=2, contexts=[10])


def test_each_request_and_repetition_has_another_stretch(tmp_path):
    class Tokenizer:
        bos_token_id = 0

        def __call__(self, text):
            return {"input_ids": list(range(100))}

    (tmp_path / "text").write_text("a text")
    given, tokenizer = dict(dataset_name=None, prompts=str(tmp_path / "text")), Tokenizer()
    cut = prompts.source(replace(FOUR_PROMPTS, **given), tokenizer, 2048)
    found = cut.take(10, 0, 2) + cut.take(10, 2, 2)
    assert [prompt[1] for prompt in found] == [1, 31, 61, 91]  # evenly spread, to the end
    assert all(prompt[0] == 0 and len(prompt) == 10 for prompt in found)  # behind the first token
    tokenizer.bos_token_id = None
    cut = prompts.source(replace(FOUR_PROMPTS, **given), tokenizer, 2048)
    assert cut.take(10, 2, 1) == [list(range(60, 70))]
    assert cut.take(5, 2, 1) == [list(range(60, 65))]


def test_vllms_random_dataset_without_a_network(pair):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair["target"])
    texts = prompts.source(FOUR_PROMPTS, tokenizer, 2048).texts
    assert [len(text) for text in texts] == 4 * [10]
    assert texts == prompts.source(FOUR_PROMPTS, tokenizer, 2048).texts
    misspelt = asked(contexts=[10], dataset_args="--random-imput-len 5")
    with pytest.raises(BadInput, match="--random-imput-len"):
        prompts.source(misspelt, tokenizer, 2048)


def test_a_datasets_prompts_are_taken_one_by_one(pair, tmp_path):
    """Those that do not fit are left out, and counted."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair["target"])
    texts = ["one", "two words " * 300, "three more words", "four", "five"]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    settings = asked(
        **dict(contexts=[EACH], batch_sizes=[2, 1], repetitions=2),
        **dict(dataset_name="custom", dataset_path=str(path)),
        dataset_args="--skip-chat-template --disable-shuffle",
    )
    source = prompts.source(settings, tokenizer, max_context=500)
    wanted = [tokenizer(text)["input_ids"] for text in (texts[0], *texts[2:])]
    assert source.take(EACH, 0, 2) + source.take(EACH, 2, 2) == wanted
    assert source.num_left_out == 1 and source.longest_of(EACH) == max(wanted, key=len)
    with pytest.raises(BadInput, match=r"gave 4 prompts that fit a/model \(1 are too long"):
        prompts.source(replace(settings, repetitions=3), tokenizer, max_context=500)


def test_models_are_read_at_the_revisions_that_will_be_measured(pair, monkeypatch):
    from vllm.engine.arg_utils import EngineArgs

    from vllm_triforce_bench.bench import model_facts

    read = {}

    def create_model_config(args):
        read[args.model] = (args.revision, args.code_revision)

    monkeypatch.setattr(EngineArgs, "create_model_config", create_model_config)
    pins = {"revision": "t", "code_revision": "tc"}
    for method in ("triforce", "draft_model"):
        keys = {"ngram": {"revision": "no"}, method: {"revision": "d"}}
        model_facts.read_all(asked(**pair, engine_keys=pins, **keys))
        assert read == {pair["target"]: ("t", "tc"), pair["draft"]: ("d", None)}
    model_facts.read_all(asked(**pair))
    assert set(read.values()) == {(None, None)}


# Figures.


LATENCIES = ("time_to_first_tokens_iter", "inter_token_latencies_iter")


def test_decode_speed_and_latencies_of_a_batch():
    times = [((0.9, 1.0), ()), ((), ()), ((), (0.5,)), ((), (1.0,)), ((), (2.0,))]
    steps = [
        (end, None, Thing(num_generation_tokens=count, **dict(zip(LATENCIES, its))))
        for end, count, its in zip((1.0, 1.2, 1.5, 2.5, 3.0), (2, 0, 3, 2, 5), times)
    ]
    found = Decoded([], [(0.5, None, None), *steps], 3.0)
    assert found.decode_tokens_per_second == pytest.approx((3 + 2 + 5) / 2.0)
    assert found.time_to_first_token_s == [0.9, 1.0]
    assert found.inter_token_latency_s == [0.5, 1.0, 2.0]
    with pytest.raises(ValueError, match="more --tokens"):
        assert Decoded([], steps[:2], 1.2).decode_tokens_per_second


def test_rows_against_figures_computed_by_hand():
    speeds = [(100, 150), (200, 500), (50, 50)]  # ratios 1.5, 2.5, 1
    records = []
    for repetition, (stock, ours) in enumerate(speeds):
        records.append(record(stock, repetition=repetition))
        records.append(record(ours, method="triforce", repetition=repetition))
    # Another group has its own stock to be compared with.
    records += [record(9, temperature=0.6), record(9, method="triforce", temperature=0.6)]
    records += [record(10, group=1), record(30, method="ngram", group=1)]
    found = batch_report.summarize(records)
    assert [row["temperature"] for row in found] == [0, 0, 0, 0.6, 0.6]  # cells stay together
    rows = {row["method"]: row for row in found if not row["temperature"]}
    ours = rows["triforce"]
    assert (ours["ratio"], ours["ratio_min"], ours["ratio_max"]) == (1.5, 1.0, 2.5)
    seconds = (1 / 100 + 1 / 200 + 1 / 50, 1 / 150 + 1 / 500 + 1 / 50)
    assert ours["ratio_together"] == pytest.approx(seconds[0] / seconds[1])
    assert ours["ratio_low"] is None, "three repetitions say nothing of an interval"
    assert ours["decode_tokens_per_second"] == 150
    assert rows["ngram"]["ratio"] == 3 and rows["stock"]["measurements"] == 4
    assert ours["time_to_first_token_ms"] == 500
    assert ours["inter_token_latency_p50_ms"] == pytest.approx(20)
    assert ours["inter_token_latency_p99_ms"] == pytest.approx(30)
    assert ours["mean_acceptance_length"] == pytest.approx(1 + 6 / 4)
    assert ours["acceptance_by_position"] == [1.0, 0.5]
    assert ours["level1_acceptance_rate"] == 0.5 and ours["level2_acceptance_rate"] == 0.75
    assert ours["level2_acceptance_per_test"] == 6 / 8
    assert ours["step_parts_ms"] == pytest.approx(
        {"level 1": 20, "level 2": 60, batch_report.REST: 120}
    )
    assert ours["memory_mib"] == 3 and rows["stock"]["mean_acceptance_length"] is None


def test_an_interval_resamples_repetitions_with_their_stock():
    records = []
    for repetition, speed in enumerate((5, 8, 20, 11, 13)):
        records.append(record(speed, repetition=repetition))
        records.append(record(2 * speed, method="triforce", repetition=repetition))
    _, row = batch_report.summarize(records)
    assert (row["ratio_low"], row["ratio_high"]) == pytest.approx((2, 2))


class Undecided:
    """A stock engine whose two best tokens are 7 and 8, this far apart."""

    def __init__(self, margin):
        self.margin = margin

    def generate(self, found, params, use_tqdm):
        assert found == [{"prompt_token_ids": [1, 2, 5]}]  # up to where they part
        logprobs = [{7: Thing(logprob=-1.0), 8: Thing(logprob=-1.0 - self.margin)}]
        return [Thing(outputs=[Thing(logprobs=logprobs)])]


@pytest.mark.parametrize(
    "found, dtype, margin, outcome",
    [
        ([5, 7], "float32", None, "identical"),
        ([5, 8], "float32", 1e-4, "tie"),
        ([5, 8], "float32", 0.1, "different"),
        ([5, 8], "bfloat16", 0.1, "tie"),
        ([5, 9], "float32", 1e-4, "different"),  # not one of stock's two best
    ],
)
def test_greedy_outputs_are_stocks_or_stock_is_undecided(found, dtype, margin, outcome):
    verdict = batch.judge(Undecided(margin), [[1, 2]], [[5, 7]], [found], dtype)
    assert verdict["outcome"] == outcome


# Going on, and what is written.


def done(kept) -> set[tuple]:
    return {grid.set_of(each) for each in grid.whole_sets(kept.records)}


def test_a_run_goes_on_where_it_stopped(tmp_path):
    kept = measurement.Store(tmp_path, {"contexts": [300]})
    assert kept.settle("engines_at_once", lambda: 5) == 5
    kept.append([record(1), record(2, method="triforce")])
    kept.append([record(1, repetition=1), record(2, method="triforce", repetition=1)])
    path = tmp_path / measurement.MEASUREMENTS
    path.write_text(path.read_text()[:-9])  # ended while it wrote
    again = measurement.Store(tmp_path, {"contexts": [300]})
    assert done(again) == {("float32", 300, 1, 0.0, 0, 0)}
    # A set of which one measurement was left is measured anew, and counts once.
    again.append([record(3, repetition=1), record(4, method="triforce", repetition=1)])
    speeds = [r["decode_tokens_per_second"] for r in grid.whole_sets(again.records)]
    assert speeds == [1, 2, 3, 4] and len(again.records) == 5
    assert again.settle("engines_at_once", lambda: 2) == 5
    with pytest.raises(BadInput, match=r"contexts \[300\] there, \[400\] here"):
        measurement.Store(tmp_path, {"contexts": [400]})


def results(rows) -> dict:
    machine = dict(device="a <CPU>", cores="2", vLLM="0", date="today", command="vllm-triforce")
    return dict(environment=machine, settings=asdict(asked()), left_out={}, rows=rows)


def stands_alone(page: str, num_figures: int, *words: str) -> None:
    """Check that a page has the words and figures, and nothing from outside."""
    for word in words:
        assert word in page, word
    assert page.count("<svg") == num_figures and "prefers-color-scheme:dark" in page
    outside = re.sub(r"http://www\.w3\.org/(2000/svg|1999/xlink)", "", page)
    for word in ("http:", "https:", "<script", "<link", "src=", "@import", "url(h"):
        assert word not in outside, word


def test_the_page_stands_alone_and_has_the_numbers():
    rows = batch_report.summarize([record(123.4), record(308.5, method="triforce")])
    text = batch_report.make_page(results(rows)).render()
    stands_alone(text, 1, "123.4", "308.5", "2.50x", "TriForce", "a &lt;CPU&gt;", "100 50")


def test_synthetic_acceptances_are_called_so_wherever_they_stand(tmp_path):
    """The page, its JSON and its CSV; outputs are not compared."""
    import csv

    names = ["stock", "eagle3", "triforce", "triforce:lookup", "triforce:retrieval"]
    variants = methods.variants(names, [None], "TARGET", "DRAFT", {}, [0.75, 0.5])
    stock, eagle3, *ours = variants
    assert stock.keys is None and stock.label == "stock vLLM"
    assert all(v.label.endswith(", synthetic 0.75, 0.5") for v in variants[1:])
    assert eagle3.keys["rejection_sample_method"] == "synthetic"
    assert eagle3.keys["synthetic_acceptance_rates"] == pytest.approx([0.75, 0.75**2, 0.75**3])
    assert [v.keys["synthetic_acceptance_rates"] for v in ours] == [[0.5]] * 3
    assert [v.keys.get("synthetic_level1_acceptance") for v in ours] == [0.75, 0.75, None]
    rows = batch_report.summarize([record(1), record(2, method="triforce", label=ours[0].label)])
    found = results(rows)
    found["settings"] = asdict(asked(synthetic_acceptances=[0.75, 0.5]))
    report.write_reports(tmp_path, found, batch_report.make_page(found))
    text = (tmp_path / "report.html").read_text()
    assert "Decode speed at synthetic acceptances against stock vLLM" in text
    assert "accepted with probability 0.75" in text and "not compared" in text
    with (tmp_path / "results.csv").open() as file:
        labels = [row["label"] for row in csv.DictReader(file)]
    assert labels == ["stock vLLM", "TriForce, synthetic 0.75, 0.5"]
    assert '"synthetic_acceptances": [' in (tmp_path / "results.json").read_text()


def test_methods_without_a_synthetic_test_are_left_out(monkeypatch):
    """vLLM's CPU build of Model Runner V1 lacks it, TriForce does not."""
    from vllm_triforce.config import checks

    names = ["stock", "ngram", "triforce"]
    variants = methods.variants(names, [None], "TARGET", None, {}, [0.75, 0.5])
    monkeypatch.setattr(checks, "has_fixed_shapes", lambda: True)
    left_out: dict[str, str] = {}
    assert methods.with_synthetic_test(variants, left_out) == variants and not left_out
    monkeypatch.setattr(checks, "has_fixed_shapes", lambda: False)
    kept = methods.with_synthetic_test(variants, left_out)
    assert [v.method for v in kept] == ["stock", "triforce"] and "CPU" in left_out["ngram"]
    with pytest.raises(BadInput, match=r"'suffix' needs a length .* --suffix"):
        methods.variants(["suffix"], [None], "TARGET", None, {}, [0.75, 0.5])


def test_every_method_named_in_the_help_has_a_colour():
    assert list(colours.METHODS) == list(methods.METHODS)
    assert len(set(colours.METHODS.values())) == len(methods.METHODS)
    assert command.__name__ == cli.COMMANDS["bench"].module


def test_the_defaults_are_what_is_served(pair):
    """The budget of TriForce's own default, in the dtype that vLLM would take."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_triforce.config import TriForceConfig
    from vllm_triforce_bench.bench import model_facts

    asked_for = read(f"--target {pair['target']} --dataset-name random")
    assert asked_for.budgets == [TriForceConfig().retrieval_budget]
    served = str(EngineArgs(model=pair["target"]).create_model_config().dtype)
    target, _ = model_facts.read_all(asked_for)
    found = model_facts.served_dtypes(target, [*asked_for.dtypes, "float32"])
    assert found == [served.removeprefix("torch."), "float32"]
    with pytest.raises(BadInput, match="--engine with --target"):
        model_facts.read_all(replace(asked_for, engine_keys={"block_sise": 32}))
