"""Options of ``pytest benchmarks/gpu``, and the sizes of its checks."""

from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Sizes:
    """Sizes of a check.

    Args:
        context: tokens of the longest prompt.
        num_tokens: tokens of each answer.
        batches: numbers of requests.
        num_samples: tokens of each of four sampled answers.
        is_small: True for the emulated GPU, or a rehearsal on a CPU.
    """

    context: int = 3000
    num_tokens: int = 48
    batches: tuple[int, ...] = (1, 4, 8)
    num_samples: int = 160
    is_small: bool = False


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--small",
        action="store_true",
        help="few short prompts, no torch.compile: for the emulated GPU, or a rehearsal on a CPU",
    )


@pytest.fixture(scope="session")
def sizes(request) -> Sizes:
    if request.config.getoption("--small"):
        return Sizes(400, 10, (1, 2), 12, is_small=True)
    return Sizes()


def pytest_collection_modifyitems(config, items) -> None:
    from vllm.platforms import current_platform

    has_gpu = current_platform.is_cuda_alike()
    for item in items:
        item.add_marker(pytest.mark.gpu)
        if not has_gpu and not config.getoption("--small"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU; --small rehearses on a CPU"))
