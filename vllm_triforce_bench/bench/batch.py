"""Fixed batches: engines take turns, and their greedy outputs are compared with stock vLLM's."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
from vllm.config import ModelConfig
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams

from vllm_triforce.metrics.counters import LevelCounters
from vllm_triforce.vllm_patches.cpu_build import fix_expand_kernel
from vllm_triforce_bench.bench import engines
from vllm_triforce_bench.bench.engines import Decoded, Engine
from vllm_triforce_bench.bench.grid import PairedSet, rotated
from vllm_triforce_bench.bench.measurement import BaseMeasurement
from vllm_triforce_bench.bench.methods import Variant
from vllm_triforce_bench.bench.model_facts import kv_cache_bytes, weight_bytes
from vllm_triforce_bench.bench.settings import Settings

# Memory of an engine beside weights and KV cache: buffers and compiled code (0.3 to 0.5 GiB for the
# embedded pair on the CPU), and activations of a larger model.
OVERHEAD_BYTES = 1 << 30
# Share of the free memory that engines may take.
SHARE_OF_FREE_MEMORY = 0.7
# Tokens of untimed decodes: enough for a few proposals, so that everything is compiled.
WARM_UP_TOKENS = 16
# Distance of stock's two best log-probabilities within which rounding may choose. Attention in
# float32 over thousands of tokens rounds to about 1e-5; two steps of a bfloat16 logit between 8 and
# 16 are 0.125.
TIE = {"float32": 2e-4, "bfloat16": 0.15, "float16": 0.02}

IDENTICAL, A_TIE, DIFFERENT = "identical", "tie", "different"


def fit_at_once(settings: Settings, target: ModelConfig, draft: ModelConfig | None) -> int:
    """Number of engines that fit into the free memory, at least 2."""
    if settings.engines_at_once is not None:
        return settings.engines_at_once
    models = [target] if draft is None else [target, draft]
    weights = 2 * sum(map(weight_bytes, models))
    kv_cache = max(kv_cache_bytes(settings, dtype, *models) for dtype in settings.dtypes)
    free = psutil.virtual_memory().available
    if not current_platform.is_cpu():
        free = torch.cuda.mem_get_info()[0]
    return max(2, int(SHARE_OF_FREE_MEMORY * free / (weights + kv_cache + OVERHEAD_BYTES)))


def sets(settings: Settings, num_groups: int) -> list[PairedSet]:
    """List the sets in the order of measurement: engines change least often, prompts next."""
    return [
        PairedSet(dtype, context, batch_size, temperature, group, repetition)
        for dtype, group, context, batch_size, repetition, temperature in itertools.product(
            settings.dtypes,
            range(num_groups),
            settings.contexts,
            settings.batch_sizes,
            range(settings.repetitions),
            settings.temperatures,
        )
    ]


@dataclass
class Measurement(BaseMeasurement):
    """Measures engines of this process."""

    def __post_init__(self) -> None:
        self._engines: list[Engine] = []
        self._warm: set[tuple] = set()

    def _run(self, sets: Sequence[PairedSet]) -> None:
        engines_of = None
        # Sets of the same prompts differ in temperature alone.
        for first, run in itertools.groupby(sets, lambda paired: paired._replace(temperature=0)):
            if (first.dtype, first.group) != engines_of:
                engines_of = (first.dtype, first.group)
                self._start_engines(*engines_of)
            # A smaller batch has the first prompts of a larger one.
            number = first.repetition * max(self.settings.batch_sizes)
            texts = self.prompts.take(first.context, number, first.batch_size)
            cold = self._read_cold(texts, first.repetition)
            for paired in run:
                self._finish(paired, self._measure(paired, texts, cold))
        engines.end(self._engines)

    def _start_engines(self, dtype: str, group: int) -> None:
        # Before the next engines: two groups would not fit.
        engines.end(self._engines)
        self._warm.clear()
        for variant in self.groups[group]:
            self.progress.say(f"starting {variant.label}, {dtype}")
            self._engines.append(
                engines.start(self.settings, dtype, variant, self.target, self.draft)
            )
            # vLLM registers its kernel again with every engine.
            fix_expand_kernel()
        longest = [self.prompts.longest_of(max(self.settings.contexts))]
        for engine in self._engines:
            self.progress.say(f"warming up {engine.variant.label}, {dtype}")
            for temperature in sorted({0.0, max(self.settings.temperatures)}):
                self._warm_up(engine, longest, temperature)

    def _read_cold(self, texts: list[list[int]], turn: int) -> dict[Variant, Decoded]:
        """Let every engine read the prompts without its prefix cache."""
        num_tokens = sum(map(len, texts))
        cold = {}
        for engine in rotated(self._engines, turn):
            self.progress.say(f"{engine.variant.label} reads {num_tokens} tokens")
            if not engine.llm.reset_prefix_cache():
                raise RuntimeError(f"{engine.variant.label}: the prefix cache could not be emptied")
            cold[engine.variant] = self._warm_up(engine, texts, 0.0)
        return cold

    def _warm_up(self, engine: Engine, texts: list[list[int]], temperature: float) -> Decoded:
        settings = self.settings
        return engine.decode(texts, WARM_UP_TOKENS, temperature, settings.top_p, settings.seed)

    def _measure(
        self, paired: PairedSet, texts: list[list[int]], cold: dict[Variant, Decoded]
    ) -> list[dict]:
        """Return a record for each engine, in the order of the group."""
        order = rotated(self._engines, paired.repetition)
        shape = (paired.context, paired.batch_size, bool(paired.temperature))
        if paired.temperature and shape not in self._warm:
            for engine in order:
                self._warm_up(engine, texts, paired.temperature)
        self._warm.add(shape)
        records: dict[Variant, dict] = {}
        tokens: dict[Variant, list[list[int]]] = {}
        for place, engine in enumerate(order):
            record = self._begin(engine.variant, paired, place, len(order))
            figures, decoded = self._measure_one(engine, paired, texts, cold[engine.variant])
            records[engine.variant] = record | figures
            tokens[engine.variant] = decoded.token_ids
        if not paired.temperature and self.settings.synthetic_acceptances is None:
            stock, *others = self._engines
            for variant in (engine.variant for engine in others):
                expected, actual = tokens[stock.variant], tokens[variant]
                verdict = judge(stock.llm, texts, expected, actual, paired.dtype)
                records[variant]["greedy"] = verdict
        return [records[engine.variant] for engine in self._engines]

    def _measure_one(
        self, engine: Engine, paired: PairedSet, texts: list[list[int]], cold: Decoded
    ) -> tuple[dict, Decoded]:
        # Without a GPU, both figures of its memory are 0.
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        decoded, levels = self._decode(engine, paired, texts)
        record = {
            "decode_tokens_per_second": decoded.decode_tokens_per_second,
            "time_to_first_token_s": [round(s, 6) for s in cold.time_to_first_token_s],
            "inter_token_latency_s": [round(s, 6) for s in decoded.inter_token_latency_s],
            "num_prompt_tokens": sum(map(len, texts)),
            "num_tokens": sum(map(len, decoded.token_ids)),
            "num_steps": len(decoded.steps),
            "seconds": decoded.seconds,
            "speculation": decoded.speculation,
            "levels": None if levels is None else asdict(levels),
            "greedy": None,
            "memory_bytes": engine.memory_bytes + torch.cuda.max_memory_allocated() - allocated,
        }
        if self.settings.pass_times and levels is not None:
            timed = decoded
            if not current_platform.is_cpu():
                # Each part waits for the device: times of launches become its own.
                rpc, name = engine.llm.collective_rpc, "triforce_synchronize_times"
                rpc(name, args=(True,))
                try:
                    timed, levels = self._decode(engine, paired, texts)
                finally:
                    rpc(name, args=(False,))
                assert levels is not None
            record["parts"] = {
                "num_steps": len(timed.steps),
                "seconds": timed.seconds,
                "num_level2_passes": levels.num_level2_passes,
                "time_seconds": levels.time_seconds,
            }
        return record, decoded

    def _decode(
        self, engine: Engine, paired: PairedSet, texts: list[list[int]]
    ) -> tuple[Decoded, LevelCounters | None]:
        """Decode a set's prompts; return the decode, and the increments of TriForce's counters.

        Raises:
            RuntimeError: prompts were read again, which is not decoding.
        """
        settings, before = self.settings, engine.levels()
        seed = settings.seed + paired.repetition
        decoded = engine.decode(texts, settings.tokens, paired.temperature, settings.top_p, seed)
        for output, prompt in zip(decoded.outputs, texts):
            num_cached = output.num_cached_tokens or 0
            # vLLM computes the last token again, and with it a block of up to 128 tokens.
            if num_cached < len(prompt) - 256:
                raise RuntimeError(
                    f"only {num_cached} of a prompt's {len(prompt)} tokens were in the prefix "
                    "cache; give more --kv-cache-gib, or leave prefix caching on"
                )
        levels = engine.levels()
        return decoded, None if levels is None or before is None else levels.since(before)


def judge(
    stock, prompts: list[list[int]], stock_ids: list[list[int]], ids: list[list[int]], dtype: str
) -> dict[str, Any]:
    """Compare the tokens of a batch with stock vLLM's.

    Args:
        stock: engine without speculation; it decodes only if tokens differ.

    Returns:
        Of the worst request: ``outcome``, its number, ``place`` of the first token that differs,
        and ``margin`` of stock's two best log-probabilities there.
    """
    worst = dict(outcome=IDENTICAL, request=None, place=None, margin=None)
    for i, (prompt, expected, answer) in enumerate(zip(prompts, stock_ids, ids)):
        if answer == expected:
            continue
        place = next(k for k, (a, b) in enumerate(zip(expected, answer)) if a != b)
        asked = SamplingParams(temperature=0, max_tokens=1, logprobs=2, detokenize=False)
        inputs = [{"prompt_token_ids": prompt + expected[:place]}]
        table = stock.generate(inputs, asked, use_tqdm=False)[0].outputs[0].logprobs[0]
        best = sorted(table, key=lambda token: -table[token].logprob)[:2]
        margin = table[best[0]].logprob - table[best[1]].logprob
        is_tie = {expected[place], answer[place]} == set(best) and margin < TIE[dtype]
        outcome = A_TIE if is_tie else DIFFERENT
        verdict = dict(outcome=outcome, request=i, place=place, margin=margin)
        if not is_tie:
            return verdict
        if worst["outcome"] == IDENTICAL:
            worst = verdict
    return worst
