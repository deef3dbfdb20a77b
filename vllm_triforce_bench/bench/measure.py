"""The loop: engines of a group alive together, each set's methods one right after the other."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from vllm_triforce.metrics.counters import LevelCounters
from vllm_triforce.vllm_patches.cpu_build import fix_expand_kernel
from vllm_triforce_bench.bench import grid, identity
from vllm_triforce_bench.bench.engines import Engine, SpeculationStats, end, start
from vllm_triforce_bench.bench.grid import PairedSet
from vllm_triforce_bench.bench.methods import Variant
from vllm_triforce_bench.bench.model_facts import ModelFacts
from vllm_triforce_bench.bench.pass_times import outside_passes
from vllm_triforce_bench.bench.prompts import cut
from vllm_triforce_bench.bench.settings import Settings
from vllm_triforce_bench.bench.store import Store
from vllm_triforce_bench.bench.stream import Streamed, stream

# Of the untimed decodes: enough for a few proposals, so that everything is compiled.
WARM_UP_TOKENS = 16


class Measurement:
    """Measures what is not in the store yet.

    Args:
        tokens: all tokens that prompts are cut from.
        say: shows a line of what is going on.
        advance: called after each set with what remains and the seconds that are left, if known.
    """

    def __init__(
        self,
        settings: Settings,
        groups: list[list[Variant]],
        store: Store,
        tokens: list[int],
        bos_token_id: int | None,
        target: ModelFacts,
        draft: ModelFacts | None,
        say: Callable[[str], None],
        advance: Callable[[int, float | None], None],
    ) -> None:
        self._settings, self._groups, self._store = settings, groups, store
        self._tokens, self._bos = tokens, bos_token_id
        self._target, self._draft = target, draft
        self._say, self._advance = say, advance
        self._engines: list[Engine] = []
        self._warm: set[tuple] = set()

    def run(self, sets: Sequence[PairedSet]) -> None:
        """Measures the sets in their order; those that are done must not be among them."""
        time_left = grid.TimeLeft(self._settings.tokens)
        remaining, place = list(sets), None
        for prompts, run in grid.by_prompts(sets):
            if (prompts.dtype, prompts.group) != place:
                place = (prompts.dtype, prompts.group)
                self._start_engines(*place)
            began = time.perf_counter()
            texts = self._cut(prompts)
            cold = self._read_cold(texts, prompts.repetition)
            for paired in run:
                self._store.append(self._measure(paired, texts, cold))
                remaining.remove(paired)
                time_left.finished(paired, time.perf_counter() - began)
                began = time.perf_counter()
                self._advance(len(remaining), time_left.seconds(remaining))
        end(self._engines)

    def _start_engines(self, dtype: str, group: int) -> None:
        # Before the next engines: two groups would not fit.
        end(self._engines)
        self._warm.clear()
        for variant in self._groups[group]:
            self._say(f"starting {variant.label}, {dtype}")
            self._engines.append(start(self._settings, dtype, variant, self._target, self._draft))
            # vLLM registers its own kernel again with every engine.
            fix_expand_kernel()
        longest = grid.Prompts(dtype, group, max(self._settings.contexts), 1, 0)
        for engine in self._engines:
            self._say(f"warming up {engine.variant.label}, {dtype}")
            for temperature in sorted({0.0, max(self._settings.temperatures)}):
                self._decode_a_little(engine, self._cut(longest), temperature)

    def _cut(self, prompts: grid.Prompts) -> list[list[int]]:
        return cut(
            self._tokens,
            prompts.context,
            prompts.batch_size,
            prompts.repetition,
            self._settings,
            self._bos,
        )

    def _read_cold(self, texts: list[list[int]], turn: int) -> dict[Variant, Streamed]:
        """Every engine reads the prompts, which it does not know; greedy, and a little decoded."""
        size = f"{len(texts)} x {len(texts[0])}"
        cold = {}
        for engine in grid.rotated(self._engines, turn):
            self._say(f"{engine.variant.label} reads {size} tokens")
            if not engine.llm.reset_prefix_cache():
                raise RuntimeError(f"{engine.variant.label}: the prefix cache could not be emptied")
            cold[engine.variant] = self._decode_a_little(engine, texts, 0.0)
        return cold

    def _decode_a_little(
        self, engine: Engine, texts: list[list[int]], temperature: float
    ) -> Streamed:
        return stream(
            engine.llm,
            texts,
            WARM_UP_TOKENS,
            temperature,
            self._settings.top_p,
            self._settings.seed,
        )

    def _measure(
        self, paired: PairedSet, texts: list[list[int]], cold: dict[Variant, Streamed]
    ) -> list[dict]:
        cell = paired.cell
        order = grid.rotated(self._engines, paired.repetition)
        shape = (cell.context, cell.batch_size, bool(cell.temperature))
        if cell.temperature and shape not in self._warm:
            for engine in order:
                self._decode_a_little(engine, texts, cell.temperature)
        self._warm.add(shape)
        found: dict[Variant, dict] = {}
        tokens: dict[Variant, list[list[int]]] = {}
        for place, engine in enumerate(order):
            self._say(
                f"{engine.variant.label}: {cell.batch_size} x {cell.context} tokens, "
                f"{cell.dtype}, T={cell.temperature:g}, repetition {paired.repetition + 1}"
            )
            record, streamed = self._measure_one(engine, paired, texts, cold[engine.variant])
            found[engine.variant] = record | {"order": place}
            tokens[engine.variant] = streamed.token_ids
        if not cell.temperature:
            self._check_identity(cell.dtype, texts, tokens, found)
        return [found[engine.variant] for engine in self._engines]

    def _measure_one(
        self, engine: Engine, paired: PairedSet, texts: list[list[int]], cold: Streamed
    ) -> tuple[dict, Streamed]:
        cell, settings = paired.cell, self._settings
        seed = settings.seed + paired.repetition
        device = DevicePeak()
        levels_before, speculation_before = engine.levels(), engine.recorder.sums
        streamed = stream(
            engine.llm,
            texts,
            settings.tokens,
            cell.temperature,
            settings.top_p,
            seed,
            engine.passes,
        )
        levels = engine.levels()
        if levels is not None and levels_before is not None:
            levels = levels.since(levels_before)
        _check_cached(streamed, texts)
        record = {
            **asdict(cell),
            "group": paired.group,
            "repetition": paired.repetition,
            **measured(
                engine.variant,
                streamed,
                cold,
                levels,
                engine.recorder.sums.since(speculation_before),
            ),
            "memory_bytes": engine.memory_bytes + device.growth_bytes(),
        }
        return record, streamed

    def _check_identity(
        self,
        dtype: str,
        texts: list[list[int]],
        tokens: dict[Variant, list[list[int]]],
        found: dict[Variant, dict],
    ) -> None:
        stock = next(engine for engine in self._engines if engine.variant.is_stock)
        wanted = tokens[stock.variant]
        for variant, outputs in tokens.items():
            if not variant.is_stock:
                verdict = identity.judge(stock.llm, texts, wanted, outputs, dtype)
                found[variant]["greedy"] = verdict.to_dict()


def measured(
    variant: Variant,
    streamed: Streamed,
    cold: Streamed,
    levels: LevelCounters | None,
    speculation: SpeculationStats,
) -> dict:
    """One measurement as JSON values."""
    return {
        "method": variant.method,
        "budget": variant.budget,
        "label": variant.label,
        "decode_tokens_per_second": streamed.decode_tokens_per_second,
        "time_to_first_token_s": _rounded(cold.time_to_first_token_s),
        "inter_token_latency_s": _rounded(streamed.inter_token_latency_s),
        "num_tokens": sum(map(len, streamed.token_ids)),
        "num_steps": streamed.num_steps,
        "seconds": streamed.seconds,
        "outside_passes": outside_passes(streamed.marks),
        "speculation": asdict(speculation),
        "levels": None if levels is None else asdict(levels),
        "greedy": None,
    }


def _rounded(seconds: list[float]) -> list[float]:
    return [round(value, 6) for value in seconds]


class DevicePeak:
    """What a run allocates on a GPU beyond what was allocated before; 0 on the CPU."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda if torch.cuda.is_available() else None
        if self._cuda is not None:
            self._cuda.reset_peak_memory_stats()
            self._before = self._cuda.memory_allocated()

    def growth_bytes(self) -> int:
        if self._cuda is None:
            return 0
        return self._cuda.max_memory_allocated() - self._before


def _check_cached(streamed: Streamed, texts: list[list[int]]) -> None:
    """Reading the prompt is not decoding: it must have been in the prefix cache."""
    for cached, prompt in zip(streamed.num_cached_tokens, texts):
        # vLLM computes the last token again, and with it its block, of up to 128 tokens.
        if cached < len(prompt) - 256:
            raise RuntimeError(
                f"only {cached} of a prompt's {len(prompt)} tokens were in the prefix cache; "
                "give more --kv-cache-gib, or leave prefix caching on"
            )
