"""The loop over sets of measurements, as far as both benchmarks share it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_triforce_bench.bench.grid import PairedSet, batch_text
from vllm_triforce_bench.bench.methods import Variant
from vllm_triforce_bench.bench.model_facts import ModelFacts
from vllm_triforce_bench.bench.prompts import OwnPrompts, Stretches
from vllm_triforce_bench.bench.settings import Settings
from vllm_triforce_bench.bench.store import Store
from vllm_triforce_bench.console import Progress


@dataclass
class BaseMeasurement(ABC):
    """Measures sets and stores their records.

    Args:
        groups: variants whose engines live together.
    """

    settings: Settings
    groups: list[list[Variant]]
    store: Store
    prompts: Stretches | OwnPrompts
    target: ModelFacts
    draft: ModelFacts | None
    progress: Progress

    def run(self, sets: Sequence[PairedSet], num_done: int) -> None:
        """Measure sets that are not in the store yet, in their order.

        Args:
            num_done: sets that earlier runs have finished.
        """
        self._num_done, self._num_sets = num_done, num_done + len(sets)
        self.progress.begin(sum(map(self._work, sets)))
        self._run(sets)

    @abstractmethod
    def _run(self, sets: Sequence[PairedSet]) -> None:
        """Measure the sets, and finish each."""

    def _finish(self, paired: PairedSet, records: list[dict]) -> None:
        self.store.append(records)
        self._num_done += 1
        self.progress.advance(self._work(paired))
        self.progress.report(f"{self._num_done} of {self._num_sets} sets")

    def _work(self, paired: PairedSet) -> float:
        """Estimate the work of a set: a written token counts for 20 read ones."""
        context = paired.context or self.settings.longest_prompt
        num_reqs = self.settings.num_requests(paired.batch_size)
        return num_reqs * (context + 20 * self.settings.tokens)

    def _begin(self, variant: Variant, paired: PairedSet, place: int, num_paired: int) -> dict:
        """Show the current work, and begin its record.

        Args:
            place: turn of the variant among those of the set.
        """
        self.progress.say(
            f"{variant.label}: {batch_text(paired.batch_size, paired.context)}, {paired.dtype}, "
            f"T={paired.temperature:g}, repetition {paired.repetition + 1}"
        )
        return {
            **paired._asdict(),
            "method": variant.method,
            "budget": variant.budget,
            "label": variant.label,
            "order": place,
            "num_paired": num_paired,
        }
