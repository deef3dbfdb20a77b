"""The matrix on Model Runner V1: engines in this process."""

from contextlib import contextmanager

from tests.inside import built, worker_of
from tests.parity.disturbing import Poison, are_finite, replaced
from tests.parity.running import Job
from vllm_triforce.core.limits import logger
from vllm_triforce.runner_v1 import verification as inner


class Host:
    def __init__(self, engines) -> None:
        self._engines = engines

    def engine(self, job: Job):
        return self._engines.get(job.target, job.triforce, **job.engine)

    def policy(self, llm) -> str:
        if not worker_of(llm).triforce.config.uses_level2:
            return ""
        return built(llm).speculator.level2.cache.policy.name

    def held(self, llm) -> dict[str, int]:
        return llm.collective_rpc("triforce_held_requests")[0]

    @contextmanager
    def disturbed(self, llm, kind: str, *how):
        if kind == "nan":
            with self._with_nan(llm, *how) as said:
                yield said
        elif kind == "recovered from the whole":
            with replaced(inner, "residual", lambda target, draft, token: target):
                yield {}
        else:
            raise ValueError(kind)

    @contextmanager
    def _with_nan(self, llm, level: int, at_pass: int, together: int):
        speculator = built(llm).speculator
        speculator.disabled_requests.has_warned = False
        warnings: list[str] = []
        broken = speculator.level1.model if level == 1 else speculator.level2
        layer = broken.model.model.layers[0 if level == 1 else 2]
        batches: list[int] = []

        def is_due(number: int) -> bool:
            """Some pass later, if not all requests propose yet: how many steps it takes to read
            their prompts depends on what is cached."""
            return number >= at_pass and batches[-1] == together

        poison = Poison(broken.model, layer, is_due)
        original = speculator.propose

        def propose(batch):
            batches.append(len(batch))
            return original(batch)

        said: dict = {}
        with (
            replaced(logger, "warning", lambda *a: warnings.append(a[0] % a[1:])),
            replaced(broken, "model", poison),
            replaced(speculator, "propose", propose),
        ):
            yield said
        said |= {
            "struck": poison.has_struck and poison.num_passes > at_pass,
            "warned": len(warnings) == 1 and f"NaN in level {level}'s" in warnings[0],
            "rows": batches,
            "finite": are_finite(llm),
        }
