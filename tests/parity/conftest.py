"""What both runners are compared with, and on."""

import pytest

from tests.models import PAIR
from tests.parity.checks import By
from tests.parity.models import Exact, make_models
from tests.parity.stock import Stock


@pytest.fixture(scope="module", autouse=True)
def _ranks_without_compiler():
    """vLLM compiles the ranks of log-probabilities, which takes 20 s and changes nothing."""
    from vllm.v1.sample import sampler

    with pytest.MonkeyPatch.context() as patch:
        compiled = sampler.batched_count_greater_than
        plain = getattr(compiled, "_torchdynamo_orig_callable", compiled)
        patch.setattr(sampler, "batched_count_greater_than", plain)
        yield


@pytest.fixture(scope="session")
def parity_models(tmp_path_factory, gqa_pair):
    if not (PAIR / "target").exists():
        pytest.skip(f"no model pair in {PAIR}")
    return make_models(tmp_path_factory.mktemp("parity"), gqa_pair)


@pytest.fixture(scope="session")
def by(engines) -> By:
    return By(Stock(engines), Exact())
