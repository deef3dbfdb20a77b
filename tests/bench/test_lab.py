"""Promise: the lab measures what it says: shipped selection, stock attention, true agreement."""

import copy
import dataclasses
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.models import PAIR, PROMPTS, make_architecture, make_llama
from vllm_triforce import cli, selection
from vllm_triforce.cache.pass_selection import TOKENS_PER_SELECTION, PassSelection
from vllm_triforce.cache.retrieval_cache import RetrievalCache
from vllm_triforce.config.budget import RetrievalBudget
from vllm_triforce_bench.lab.copies import SCHEMES, round_to_fp8, round_to_int4
from vllm_triforce_bench.lab.measure import acceptance, next_token_probs
from vllm_triforce_bench.lab.policies import POLICIES, LabPolicy, Sizes
from vllm_triforce_bench.lab.target import Target
from vllm_triforce_bench.lab.trace import AttentionOptions, LayerTrace, causal_mask

START, COUNT, DIM = 301, 37, 16
SPARSE = {name: policy for name, policy in POLICIES.items() if name != "full"}
SMALL = Sizes(budget=64, chunk_size=8, tokens_per_pass=7)


def layer_trace(num_heads=4, num_kv_heads=2, seed=0, **options) -> LayerTrace:
    """A layer of random keys and values."""
    torch.manual_seed(seed)
    total = START + COUNT
    keys, values = torch.randn(2, num_kv_heads, total, DIM)
    options = AttentionOptions(DIM**-0.5, **options)
    return LayerTrace(keys, values, num_heads // num_kv_heads, START, options)


def some_queries(num_heads: int, seed: int = 0) -> torch.Tensor:
    """[num_heads, COUNT, DIM]: of the replayed tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_heads, COUNT, DIM, generator=generator) * 2


def kept(layer: LayerTrace, policy: LabPolicy, kv_head: int, query) -> torch.Tensor:
    """[group, COUNT, tokens]: what a policy shows to queries of all heads."""
    scores = query[layer.heads(kv_head)] @ layer.keys[kv_head].T * DIM**-0.5
    visible = causal_mask(layer.positions(), layer.num_tokens)
    mask = policy.mask(layer, kv_head, query[layer.heads(kv_head)], scores, visible)
    return (mask & visible).expand_as(scores)


@pytest.fixture(scope="module")
def gqa(tmp_path_factory):
    """A random Llama, four query heads to a KV head, that attends here and there."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("lab")
    path = make_llama(folder, num_heads=8, num_kv_heads=2, std=0.05, query_scale=4)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return Target(model), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 4096, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# The passes.


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt-oss"])
def test_the_full_pass_is_the_models_own(tmp_path, name):
    """Soft caps, sliding windows and sinks too: logits are those of transformers' eager code."""
    from transformers import AutoModelForCausalLM

    path = make_architecture(tmp_path, name)
    ids = tokens(200)
    stock = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        wanted = stock(torch.tensor([ids])).logits[0, 150:]
    target = Target(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    found, _ = target.replay(target.record(ids[:150], ids[150:]), None)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-3)


def test_a_greedy_replay_is_the_models_own_continuation(gqa):
    target, stock = gqa
    prompt = tokens(90)
    with torch.inference_mode():
        out = stock.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    trace = target.record(prompt, 12)
    assert trace.replayed == out[0, 90:].tolist()


def test_a_sparse_pass_is_stock_attention_under_a_mask(gqa):
    """Oracle: transformers' own cache and eager attention, one token at a time, where the mask
    hides what streaming drops. Earlier tokens' KV is the full pass's."""
    from transformers import DynamicCache

    target, stock = gqa
    ids = tokens(220)
    trace = target.record(ids[:190], ids[190:])
    policy = POLICIES["streaming"](SMALL)
    found, _ = target.replay(trace, policy)
    stock.set_attn_implementation("eager")
    layer = trace.layers[0]
    visible = causal_mask(layer.positions(), layer.num_tokens)
    query = torch.randn(layer.group, layer.num_replayed, layer.keys.shape[-1])
    shown = policy.mask(layer, 0, query, torch.zeros(1, *visible.shape), visible)[0]
    for row in range(0, 30, 5):
        position = 190 + row
        with torch.inference_mode():
            cache = DynamicCache(config=stock.config)
            stock(torch.tensor([ids[:position]]), past_key_values=cache)
            mask = torch.zeros(1, 1, 1, position + 1)
            mask[..., ~shown[row, : position + 1]] = -1e30
            wanted = stock(
                torch.tensor([[ids[position]]]), past_key_values=cache, attention_mask=mask
            ).logits[0, -1]
        torch.testing.assert_close(found[row], wanted, atol=1e-4, rtol=1e-3)
        assert not torch.equal(mask, torch.zeros_like(mask))


# The policies.


@pytest.mark.parametrize("policy", SPARSE.values(), ids=SPARSE.keys())
def test_a_budget_that_covers_the_context_agrees_exactly(gqa, policy):
    target, _ = gqa
    ids = tokens(150)
    trace = target.record(ids[:120], ids[120:])
    full, _ = target.replay(trace, None)
    found, replay = target.replay(trace, policy(Sizes(budget=160, chunk_size=8)))
    assert torch.equal(found, full)
    probs = next_token_probs(full, 0.6, 0.9)
    assert float(acceptance(probs, next_token_probs(found, 0.6, 0.9)).min()) == 1.0
    assert replay.kept_mass == 1.0
    sparse, _ = target.replay(trace, policy(SMALL))
    assert not torch.equal(sparse, full)


@pytest.mark.parametrize("policy", SPARSE.values(), ids=SPARSE.keys())
@pytest.mark.parametrize("heads", [(2, 2), (8, 2)])
@pytest.mark.parametrize("budget", [64, 208])
def test_policies_keep_what_they_may(policy, heads, budget):
    """Sink, own token, and no more than the budget and what was written since a selection."""
    layer = layer_trace(*heads)
    sizes = dataclasses.replace(SMALL, budget=budget, recent_tokens=None)
    for kv_head in range(2):
        mask = kept(layer, policy(sizes), kv_head, some_queries(heads[0]))
        counts = mask.sum(-1)
        grown = sizes.tokens_per_pass + sizes.chunk_size
        exact = policy.name == "topk"
        assert int(counts.max()) <= budget + (0 if exact else grown)
        assert int(counts.min()) >= budget - (0 if exact else sizes.chunk_size)
        if policy.name != "topk":
            assert bool(mask.diagonal(START, 1, 2).all())


@pytest.mark.parametrize("tokens_per_pass", [7, 1, 5])
@pytest.mark.parametrize("policy", selection.POLICIES.values(), ids=selection.POLICIES)
def test_the_lab_reads_what_the_engine_selects(policy, tokens_per_pass):
    """The lab, head by head over the context in order, reads what the serving class reads with
    all layers and heads at once and scattered blocks."""
    sizes = Sizes(64, 8, 24, tokens_per_pass)
    layers = [layer_trace(8, 2, seed) for seed in range(2)]
    num_blocks = layers[0].num_tokens // 8 + 1
    blocks = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
    of_block = {int(block): place for place, block in enumerate(blocks)}

    padded = [torch.nn.functional.pad(layer.keys, (0, 0, 0, 8)) for layer in layers]
    by_block = [
        torch.stack([keys[:, 8 * of_block[b] :][:, :8] for b in range(num_blocks)])
        for keys in padded
    ]

    class Exact:
        """Summaries that are not quantized."""

        def __init__(self, kind) -> None:
            self._summaries = torch.stack(
                [kind.reduce(keys, 2).transpose(0, 1) for keys in by_block]
            )

        def dequantize(self, layer, ids):
            return self._summaries[layer][..., ids, :]

    layer = SimpleNamespace(num_kv_heads=2, head_size=DIM, kv_cache=torch.empty(num_blocks))
    attention = SimpleNamespace(layers=[layer] * 2, num_kv_heads=2, summarize=lambda *_: None)
    budget = RetrievalBudget(8, 8, 3)
    engine = RetrievalCache(attention, policy(), 8, budget, torch.float32)
    engine.summaries = {kind: Exact(kind) for kind in policy.summaries}
    lab = POLICIES[policy.name](sizes)
    queries = [some_queries(8, seed) for seed in range(2)]
    masks = [
        [kept(layer, lab, head, query)[0] for head in range(2)]
        for layer, query in zip(layers, queries)
    ]
    for row in range(0, COUNT, tokens_per_pass):
        selected = engine.selection("a", blocks, START + row)
        last = min(row + tokens_per_pass, COUNT) - 1
        tables, skipped = engine.block_table([selected], [blocks], [START + last + 1])
        if selected.summaries is not None:
            selecting = row + (last - row) // TOKENS_PER_SELECTION * TOKENS_PER_SELECTION
            in_pass = PassSelection(engine.policy, [selected], 2)
            in_pass.begin_pass([0], [1], [0], tables)
            for number, query in enumerate(queries):
                in_pass.select(number, query[None, :, selecting])
        for number in range(2):
            for head in range(2):
                table = (tables[number, 0, head] - head) // 2
                reads = [8 * of_block[int(b)] + offset for b in table for offset in range(8)]
                reads = reads[: START + last + 1 - int(skipped[0])]
                found = masks[number][head][last].nonzero().flatten().tolist()
                assert found == sorted(reads)


# The copies.


def test_a_copy_reads_the_targets_cache_with_its_own_weights(gqa):
    """Oracle: transformers' model with weights that torch has quantized, one token at a time after
    the cache of the model as it is."""
    from transformers import DynamicCache

    target, stock = gqa
    ids = tokens(120, seed=5)
    trace = target.record(ids[:100], ids[100:])
    found, _ = target.replay(trace, None, "int8-weights")
    again, _ = target.replay(trace, None)
    rounded = copy.deepcopy(stock)
    for name, layer in rounded.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            scales = layer.weight.detach().abs().amax(1) / 127
            quantized = torch.quantize_per_channel(
                layer.weight.detach(), scales.double(), torch.zeros(len(scales)), 0, torch.qint8
            )
            layer.weight.data = quantized.dequantize()
    for row in (0, 7, 19):
        with torch.inference_mode():
            cache = DynamicCache(config=stock.config)
            stock(torch.tensor([ids[: 100 + row]]), past_key_values=cache)
            fed = torch.tensor([[ids[100 + row]]])
            wanted = rounded(fed, past_key_values=cache).logits[0, -1]
        torch.testing.assert_close(found[row], wanted, atol=1e-4, rtol=1e-3)
        assert float((found[row] - again[row]).abs().max()) > 1e-3  # it is another model


def test_a_copy_in_bfloat16_knows_its_positions(gqa):
    """RoPE's angles are the target's, rounded as numbers of bfloat16 are. Frequencies in bfloat16,
    as ``model.to()`` makes them, are wrong by more with every position."""
    target, _ = gqa
    positions, ones = torch.tensor([[60_000]]), torch.ones(1)
    angles = target._copy("bfloat16").model.rotary_emb(ones.bfloat16(), positions)
    wanted = target.model.model.rotary_emb(ones, positions)
    for found, right in zip(angles, wanted, strict=True):
        torch.testing.assert_close(found.float(), right, atol=2**-8, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_keeps_few_bits(dtype):
    weight = torch.randn(6, 576).mul(torch.logspace(-3, 0, 576)).to(dtype)  # groups unlike
    weight[0] = 0
    groups = round_to_int4(weight).unflatten(1, (-1, 64))
    assert bool(groups.isfinite().all())
    assert all(len(group.unique()) <= 15 for row in groups for group in row)
    limit = weight.unflatten(1, (-1, 64)).abs().amax(-1, keepdim=True) * (0.5 / 7 + 2**-8)
    assert bool(((groups - weight.unflatten(1, (-1, 64))).abs() <= limit).all())
    assert bool(round_to_fp8(weight).isfinite().all())
    weight = torch.randn(6, 576) * torch.logspace(-3, 3, 6)[:, None]  # rows unlike
    error = (round_to_fp8(weight) - weight).abs() / weight.abs().clamp_min(
        0.05 * weight.std(1, keepdim=True)
    )
    assert 0 < float(error.max()) <= 2**-4 + 1e-6  # three bits of mantissa


def test_fewer_bits_agree_less(gqa):
    """Without a selection, by scheme: nothing is lost without a copy, most with four bits."""
    target, _ = gqa
    ids = tokens(200, seed=6)
    trace = target.record(ids[:150], ids[150:])

    def probs(policy, copy="none") -> torch.Tensor:
        return next_token_probs(target.replay(trace, policy, copy)[0], 1.0, 1.0)

    full, policy = probs(None), POLICIES["full"](SMALL)
    shares = {name: float(acceptance(full, probs(policy, name)).mean()) for name in SCHEMES}
    assert shares["none"] == 1
    assert shares["int4"] < shares["int8"] < shares["int8-weights"] < 1
    assert shares["int4"] < shares["fp8"] < shares["bfloat16"] < 1


# The measures.


def test_acceptance_is_the_share_that_both_give():
    """The sum of minima; one-hot at T=0."""
    torch.manual_seed(0)
    full, sparse = torch.randn(2, 50, 97) * 3
    for temperature, top_p in [(1.0, 1.0), (0.6, 0.9), (1.3, 0.5)]:
        p, q = (next_token_probs(x, temperature, top_p) for x in (full, sparse))
        found = acceptance(p, q)
        torch.testing.assert_close(found, torch.minimum(p, q).sum(-1), atol=1e-6, rtol=0)
        assert float(found.min()) >= 0 and float(found.max()) <= 1
        assert bool(((p > 0).sum(-1) < 97).any()) == (top_p < 1)
    greedy = acceptance(next_token_probs(full, 0, 0.9), next_token_probs(sparse, 0, 0.9))
    assert torch.equal(greedy, (full.argmax(-1) == sparse.argmax(-1)).float())


# The command.

RUN = [
    *("lab", str(PAIR / "target"), "--text", str(PROMPTS / "held_out.txt")),
    *("--context", "512", "--contexts", "256", "512", "--chunk-size", "16"),
    *("--budgets", "64", "128", "--at-budgets", "128", "--chunk-sizes", "8", "16"),
    *("--recent-shares", "0.25", "0.5"),
    *("--replay-tokens", "16", "--stretches", "2"),
]


def test_the_command_measures_every_experiment_and_writes_it_all(tmp_path, capsys):
    """From the command line to the page, on the embedded target."""
    pd = pytest.importorskip("pandas")
    pytest.importorskip("matplotlib")
    assert cli.main([*RUN, "--output", str(tmp_path)]) == 0
    shown, progress = capsys.readouterr()
    assert "By budget" in shown
    # What goes on is said without a terminal too: at the start, and after each experiment.
    lines = [line for line in progress.splitlines() if line.endswith(("left", "not known yet"))]
    assert lines[0] == "0 of 4 prompts, time left: not known yet"
    assert re.fullmatch(r"stretch 1 of 4, 256 tokens, depth: \d+%, 0:\d\d:\d\d left", lines[1])
    assert lines[-1] == "stretch 4 of 4, 512 tokens, recent: 100%, 0:00:00 left"
    assert len(lines) == 1 + 2 * (1 + 4)
    rows = pd.read_csv(tmp_path / "rows.csv")
    counts = rows.groupby("experiment").size().to_dict()
    assert counts == dict(budget=16, depth=16, chunk=4, recent=4)
    shares = rows[["greedy_agreement", "acceptance", "kept_mass"]]
    assert bool(((shares >= 0) & (shares <= 1)).all(axis=None))
    at = rows[(rows.experiment == "budget") & (rows.budget == 128)].groupby("policy")
    assert at["kept_mass"].mean().idxmax() == "topk"
    document = json.loads((tmp_path / "results.json").read_text())
    assert len(document["rows"]) == len(rows) and document["settings"]["context"] == 512
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4 and "src='http" not in page
    assert (tmp_path / "budget.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "changed, named",
    [
        (["--budgets", "100"], "budget=100 does not fit chunks of"),
        (["--chunk-sizes", "64"], "with room for the first chunk"),
        (["--context", "0"], "--context: 0 is not accepted: input should be greater than 0"),
        (["--context", "70000"], "70000"),
        (["--contexts", "70000", "--text", __file__], "positions"),
        (["--text", __file__, "--context", "40000"], "fewer than"),
        (["--text", "no-such-file"], "'no-such-file' is not a file"),
        (["--policies", "best"], "best"),
        (["--copies", "int3"], "int3"),
        (["--top-p", "0"], "--top-p: 0 is not accepted: input should be greater than 0"),
        (["--temperature", "nan"], "--temperature: nan is not accepted"),
        (["--recent-shares", "1.5"], "--recent-shares: 1.5 is not accepted: input should be less"),
        (["--device", "toaster"], "device='toaster'"),
        (["--output", __file__], "is a file"),
    ],
)
def test_bad_input_is_refused_before_the_model_loads(changed, named, capsys, monkeypatch):
    """Named in one message, exit code 2, and no weights are read."""
    from vllm_triforce_bench.lab import target

    monkeypatch.setattr(target, "load_target", lambda _: pytest.fail("the model was loaded"))
    with pytest.raises(SystemExit) as end:
        cli.main([*RUN, *changed])
    assert end.value.code == 2
    assert named in capsys.readouterr().err


def test_a_model_that_is_none_is_refused(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    for model, named in [("no/such/folder/here", "cannot be read"), (str(tmp_path), "encoder")]:
        with pytest.raises(SystemExit):
            cli.main(["lab", model, *RUN[2:]])
        assert named in capsys.readouterr().err


def test_a_copy_by_tables_is_named_beside_its_policy(tmp_path, capsys):
    few = ["--experiments", "budget", "--budgets", "128", "--stretches", "1"]
    copies = ["--policies", "full", "retrieval", "--copies", "none", "bfloat16"]
    assert cli.main([*RUN, *few, *copies, "--output", str(tmp_path)]) == 0
    shown = [
        line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if "|" in line
    ]
    names = ["full", "retrieval", "full, bfloat16", "retrieval, bfloat16"]
    assert [name for name in shown if name in names][::3] == names


def test_copies_of_experts_are_refused(tmp_path, capsys):
    """Their matrices are not linear layers, and would stay as they are without a word."""
    path = make_architecture(tmp_path, "mixtral")
    with pytest.raises(SystemExit):
        cli.main(["lab", str(path), *RUN[2:], "--copies", "fp8"])
    assert "whose weights alone the lab rounds; use bfloat16 or none" in capsys.readouterr().err


def test_attention_that_the_lab_does_not_know_is_noticed(gqa, monkeypatch):
    """A model whose own attention does something else is refused, not measured wrongly."""
    from vllm_triforce_bench.lab import target

    scores = target.attention_scores
    monkeypatch.setattr(target, "attention_scores", lambda *args: 1.5 * scores(*args))
    with pytest.raises(RuntimeError, match="says something else"):
        Target(copy.deepcopy(gqa[1]))
