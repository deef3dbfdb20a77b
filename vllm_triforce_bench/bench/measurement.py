"""The loop over sets of measurements, as far as both benchmarks share it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from vllm_triforce_bench.bench.grid import PairedSet, batch_text
from vllm_triforce_bench.bench.methods import Variant
from vllm_triforce_bench.bench.model_facts import ModelFacts
from vllm_triforce_bench.bench.prompts import OwnPrompts, Stretches
from vllm_triforce_bench.bench.settings import Settings
from vllm_triforce_bench.bench.store import Store
from vllm_triforce_bench.progress import Progress


class BaseMeasurement(ABC):
    """Measures sets and stores their records.

    Args:
        groups: variants whose engines live together.
        prompts: source of the prompts.
    """

    def __init__(
        self,
        settings: Settings,
        groups: list[list[Variant]],
        store: Store,
        prompts: Stretches | OwnPrompts,
        target: ModelFacts,
        draft: ModelFacts | None,
        progress: Progress,
    ) -> None:
        self._settings, self._groups, self._store = settings, groups, store
        self._prompts, self._target, self._draft = prompts, target, draft
        self._progress, self._num_done, self._num_sets = progress, 0, 0

    @staticmethod
    @abstractmethod
    def fit_at_once(settings: Settings, target: ModelFacts, draft: ModelFacts | None) -> int:
        """Number of engines that live together, at least 2."""

    @staticmethod
    @abstractmethod
    def sets(settings: Settings, num_groups: int) -> list[PairedSet]:
        """List the sets in the order of measurement."""

    def run(self, sets: Sequence[PairedSet], num_done: int) -> None:
        """Measure sets that are not in the store yet, in their order.

        Args:
            num_done: sets that earlier runs have finished.
        """
        self._num_done, self._num_sets = num_done, num_done + len(sets)
        self._progress.begin(sum(map(self._work, sets)))
        self._run(sets)

    @abstractmethod
    def _run(self, sets: Sequence[PairedSet]) -> None:
        """Measure the sets, and finish each."""

    def _finish(self, paired: PairedSet, records: list[dict]) -> None:
        self._store.append(records)
        self._num_done += 1
        self._progress.advance(self._work(paired))
        self._progress.report(f"{self._num_done} of {self._num_sets} sets")

    def _work(self, paired: PairedSet) -> float:
        """Estimate the work of a set: a written token counts for 20 read ones."""
        context = paired.context or self._settings.longest_prompt
        num_reqs = self._settings.num_requests(paired.batch_size)
        return num_reqs * (context + 20 * self._settings.tokens)

    def _say(self, variant: Variant, paired: PairedSet) -> None:
        """Show the current work."""
        self._progress.say(
            f"{variant.label}: {batch_text(paired.batch_size, paired.context)}, {paired.dtype}, "
            f"T={paired.temperature:g}, repetition {paired.repetition + 1}"
        )

    @staticmethod
    def _record(variant: Variant, paired: PairedSet, place: int, num_paired: int) -> dict:
        """Begin a record with the place of its figures.

        Args:
            place: turn of the variant among those of the set.
        """
        return {
            **paired._asdict(),
            "method": variant.method,
            "budget": variant.budget,
            "label": variant.label,
            "order": place,
            "num_paired": num_paired,
        }
