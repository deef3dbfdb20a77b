"""Promise: level 2 keeps what it selected, finds what matters, and is useful."""

import pytest
import torch

from tests.conftest import triforce
from tests.generation import generate
from tests.inside import attention_layers_of, built, worker_of
from tests.models import held_out_tokens
from vllm_triforce.cache.retrieval_cache import RetrievalCache
from vllm_triforce.config import TriForceConfig
from vllm_triforce.core.models import private_cache
from vllm_triforce.metrics.report import counters_of
from vllm_triforce.runner_v1.retrieval import RetrievalLevel

pytestmark = pytest.mark.engine


def run_counted(llm, prompts, **params):
    before = counters_of(llm)
    generate(llm, prompts, **params)
    return counters_of(llm).since(before)


def test_chunk_means_are_small(engines, pair):
    """At most 1 / block_size of the K cache; level 1's cache does not grow with the context."""
    keys = triforce(model=pair["draft"], retrieval_budget=256)
    llm = engines.get(pair["target"], keys)
    speculator, layers = built(llm).speculator, attention_layers_of(llm)
    key_bytes = sum(layer.kv_cache.numel() * layer.kv_cache.element_size() for layer in layers) / 2
    kept = speculator.level2.cache.summaries.values()
    assert sum(summaries.num_bytes for summaries in kept) <= key_bytes / 32 / 3
    window = speculator.level1.model.cache
    assert window.blocks_per_slot * window.block_size < 512


def test_private_caches_are_allocated_with_care(engines, pair, monkeypatch):
    """Both of ours: the mean keys of level 2 and the windows of level 1."""
    llm = engines.get(pair["target"], triforce(model=pair["draft"], retrieval_budget=256))
    level2 = built(llm).speculator.level2
    memory = type("Memory", (), {"available": 1 << 10})
    monkeypatch.setattr("vllm_triforce.cache.allocation.psutil.virtual_memory", lambda: memory)
    with pytest.raises(MemoryError, match=r"summaries of .* blocks needs .*VLLM_CPU_KVCACHE_SPACE"):
        RetrievalCache(level2.attention, level2.cache.policy, 32, None, torch.float32)
    worker, keys = worker_of(llm), TriForceConfig().with_defaults(can_adapt=True).resolve(32)
    draft = worker.triforce
    with pytest.raises(MemoryError, match=r"8 windows of 376 tokens needs .*max_speculating_seqs"):
        private_cache(draft.draft_layers, draft.vllm_config, keys, 8, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.thorough
def test_retrieval_is_useful_and_beats_streaming(engines, pair):
    """On the embedded pair at 15K to 16K, budget 1,024 tokens: of level 2's tokens that level 3
    tests, at least 0.9 are accepted, and more than with the budget spent on recent tokens."""
    kept = {}
    for selection in ("retrieval", "streaming"):
        keys = triforce(retrieval_budget=1024, selection=selection)
        # One chunk: vLLM's CPU runner cannot discard a seeded sample (patches/README.md).
        arguments = dict(max_model_len=16384, max_num_seqs=2, max_num_batched_tokens=16384)
        llm = engines.get(pair["target"], keys, **arguments)
        text = held_out_tokens(16000)
        total = None
        # The longest is read, and the others are found in the prefix cache.
        for length, temperature in ((16000, 0.0), (16000, 0.6), (15000, 0.6)):
            counted = run_counted(
                llm, [text[:length]], max_tokens=128, temperature=temperature, top_p=0.9, seed=1
            )
            total = counted if total is None else total.plus(counted)
        kept[selection] = total.level2_acceptance_per_test
    assert kept["retrieval"] >= 0.9, kept
    assert kept["retrieval"] > kept["streaming"] + 0.01, kept


def test_what_level2_reads_does_not_depend_on_the_drafts_that_it_tests(
    engines, pair, text, monkeypatch
):
    """Otherwise neither test is exact (``core/loop.py``): the logits after the newest token are the
    same whatever drafts follow it in the pass."""
    real, compared = RetrievalLevel.forward, []

    def twice(self, batch, proposal, rows, drafts):
        def forward(tokens):
            if self.pass_selection is not None:
                self.pass_selection.renew()
            return real(self, batch, proposal, rows, tokens)

        others = [[(token + 100) % 1000 for token in tokens] for tokens in drafts]
        firsts = [sum(len(tokens) + 1 for tokens in drafts[:i]) for i in range(len(rows))]
        changed = forward(others)[firsts].clone()
        logits = forward(drafts)
        if self.pass_selection is not None and all(drafts):
            compared.append(float((logits[firsts] - changed).abs().max()))
        return logits

    monkeypatch.setattr(RetrievalLevel, "forward", twice)
    llm = engines.get(pair["target"], triforce(model=pair["draft"], retrieval_budget=256))
    run_counted(llm, [text[:2000], text[2000:3500]], max_tokens=24, temperature=1.0, seed=1)
    assert len(compared) > 4
    assert max(compared) < 1e-3
