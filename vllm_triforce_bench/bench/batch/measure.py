"""The loop over sets: the engines of a group live together, and take turns."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict

from vllm.platforms import current_platform

from vllm_triforce.metrics.counters import LevelCounters
from vllm_triforce.vllm_patches.cpu_build import fix_expand_kernel
from vllm_triforce_bench.bench.batch import engines, identity
from vllm_triforce_bench.bench.batch.engines import Engine
from vllm_triforce_bench.bench.batch.stream import Streamed, stream
from vllm_triforce_bench.bench.grid import PairedSet, rotated
from vllm_triforce_bench.bench.measurement import BaseMeasurement
from vllm_triforce_bench.bench.methods import Variant
from vllm_triforce_bench.bench.settings import Settings

# Tokens of untimed decodes: enough for a few proposals, so that everything is compiled.
WARM_UP_TOKENS = 16


class Measurement(BaseMeasurement):
    """Measures engines of this process."""

    fit_at_once = staticmethod(engines.fit_at_once)

    def __init__(self, *parts) -> None:
        super().__init__(*parts)
        self._engines: list[Engine] = []
        self._warm: set[tuple] = set()

    @staticmethod
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

    def _run(self, sets: Sequence[PairedSet]) -> None:
        engines_of = None
        # Sets of the same prompts differ in temperature alone.
        for first, run in itertools.groupby(sets, lambda paired: paired._replace(temperature=0)):
            if (first.dtype, first.group) != engines_of:
                engines_of = (first.dtype, first.group)
                self._start_engines(*engines_of)
            # A smaller batch has the first prompts of a larger one.
            number = first.repetition * max(self._settings.batch_sizes)
            texts = self._prompts.take(first.context, number, first.batch_size)
            cold = self._read_cold(texts, first.repetition)
            for paired in run:
                self._finish(paired, self._measure(paired, texts, cold))
        engines.end(self._engines)

    def _start_engines(self, dtype: str, group: int) -> None:
        # Before the next engines: two groups would not fit.
        engines.end(self._engines)
        self._warm.clear()
        for variant in self._groups[group]:
            self._progress.say(f"starting {variant.label}, {dtype}")
            self._engines.append(
                engines.start(self._settings, dtype, variant, self._target, self._draft)
            )
            # vLLM registers its kernel again with every engine.
            fix_expand_kernel()
        longest = [self._prompts.longest_of(max(self._settings.contexts))]
        for engine in self._engines:
            self._progress.say(f"warming up {engine.variant.label}, {dtype}")
            for temperature in sorted({0.0, max(self._settings.temperatures)}):
                self._warm_up(engine, longest, temperature)

    def _read_cold(self, texts: list[list[int]], turn: int) -> dict[Variant, Streamed]:
        """Let every engine read the prompts without its prefix cache."""
        num_tokens = sum(map(len, texts))
        cold = {}
        for engine in rotated(self._engines, turn):
            self._progress.say(f"{engine.variant.label} reads {num_tokens} tokens")
            if not engine.llm.reset_prefix_cache():
                raise RuntimeError(f"{engine.variant.label}: the prefix cache could not be emptied")
            cold[engine.variant] = self._warm_up(engine, texts, 0.0)
        return cold

    def _warm_up(self, engine: Engine, texts: list[list[int]], temperature: float) -> Streamed:
        """Decode a few tokens."""
        settings = self._settings
        return stream(engine.llm, texts, WARM_UP_TOKENS, temperature, settings.top_p, settings.seed)

    def _measure(
        self, paired: PairedSet, texts: list[list[int]], cold: dict[Variant, Streamed]
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
            self._say(engine.variant, paired)
            record, streamed = self._measure_one(engine, paired, texts, cold[engine.variant])
            place_of = self._record(engine.variant, paired, place, len(order))
            records[engine.variant] = place_of | record
            tokens[engine.variant] = streamed.token_ids
        if not paired.temperature and self._settings.synthetic_acceptances is None:
            stock, *others = self._engines
            for variant in (engine.variant for engine in others):
                expected, actual = tokens[stock.variant], tokens[variant]
                verdict = identity.judge(stock.llm, texts, expected, actual, paired.dtype)
                records[variant]["greedy"] = asdict(verdict)
        return [records[engine.variant] for engine in self._engines]

    def _measure_one(
        self, engine: Engine, paired: PairedSet, texts: list[list[int]], cold: Streamed
    ) -> tuple[dict, Streamed]:
        device = engines.DevicePeak()
        engine.recorder.stats.clear()
        streamed, levels = self._decode(engine, paired, texts)
        record = {
            "decode_tokens_per_second": streamed.decode_tokens_per_second,
            "time_to_first_token_s": [round(s, 6) for s in cold.time_to_first_token_s],
            "inter_token_latency_s": [round(s, 6) for s in streamed.inter_token_latency_s],
            "num_prompt_tokens": sum(map(len, texts)),
            "num_tokens": sum(map(len, streamed.token_ids)),
            "num_steps": streamed.num_steps,
            "seconds": streamed.seconds,
            "speculation": engine.recorder.sums(),
            "levels": None if levels is None else asdict(levels),
            "greedy": None,
            "memory_bytes": engine.memory_bytes + device.growth_bytes(),
        }
        if self._settings.pass_times and levels is not None:
            record["parts"] = self._measure_parts(engine, paired, texts, streamed, levels)
        return record, streamed

    def _measure_parts(
        self,
        engine: Engine,
        paired: PairedSet,
        texts: list[list[int]],
        streamed: Streamed,
        levels: LevelCounters,
    ) -> dict:
        """Return a decode's times by part of a proposal; on a GPU those of one more decode."""
        if not current_platform.is_cpu():
            with engine.waiting_for_the_device():
                streamed, waited = self._decode(engine, paired, texts)
            assert waited is not None
            levels = waited
        return {
            "num_steps": streamed.num_steps,
            "seconds": streamed.seconds,
            "num_level2_passes": levels.num_level2_passes,
            "time_seconds": levels.time_seconds,
        }

    def _decode(
        self, engine: Engine, paired: PairedSet, texts: list[list[int]]
    ) -> tuple[Streamed, LevelCounters | None]:
        """Decode a set's prompts; return the decode, and the increments of TriForce's counters."""
        settings, before = self._settings, engine.levels()
        streamed = stream(
            engine.llm,
            texts,
            settings.tokens,
            paired.temperature,
            settings.top_p,
            settings.seed + paired.repetition,
        )
        _check_cached(streamed, texts)
        levels = engine.levels()
        return streamed, None if levels is None or before is None else levels.since(before)


def _check_cached(streamed: Streamed, texts: list[list[int]]) -> None:
    """Raise RuntimeError if prompts were read again, which is not decoding."""
    for num_cached, prompt in zip(streamed.num_cached_tokens, texts):
        # vLLM computes the last token again, and with it a block of up to 128 tokens.
        if num_cached < len(prompt) - 256:
            raise RuntimeError(
                f"only {num_cached} of a prompt's {len(prompt)} tokens were in the prefix cache; "
                "give more --kv-cache-gib, or leave prefix caching on"
            )
