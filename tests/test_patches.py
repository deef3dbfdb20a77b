"""Promise: every run-time change is needed, idempotent, and its upstream diff still applies."""

import subprocess
from pathlib import Path

import pytest
import torch

from tests.contract.contract import installed
from tests.contract.test_contract import NEXT_RELEASE
from tests.models import ROOT
from tests.registry.overlay import touched_files
from tools.vllm_source import fetch

DIFFS = sorted((ROOT / "patches").glob("*.diff"))


@pytest.mark.parametrize("diff", DIFFS, ids=lambda path: path.name)
def test_upstream_diff_applies_to_the_installed_vllm(diff):
    assert_applies(diff, installed())


@pytest.mark.parametrize("diff", DIFFS, ids=lambda path: path.name)
def test_upstream_diff_applies_to_the_next_release(diff):
    """Its files are read out of the release's wheel, and kept in build/."""
    folder = ROOT / "build" / f"vllm-{NEXT_RELEASE}"
    touched = [str(p.relative_to("vllm")) for p in touched_files(diff) if p.parts[0] == "vllm"]
    try:
        vllm = fetch(NEXT_RELEASE, folder, touched)
    except (RuntimeError, OSError) as error:
        pytest.skip(f"the source of vLLM {NEXT_RELEASE} cannot be fetched: {error}")
    assert_applies(diff, vllm)


def assert_applies(diff: Path, vllm: Path) -> None:
    done = subprocess.run(
        ["patch", "--dry-run", "--batch", "--forward", "-p1", "-d", vllm.parent, "-i", diff],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture()
def fresh_host():
    """vLLM's kernel as the CPU platform registers it."""
    import importlib

    from vllm.platforms import current_platform
    from vllm.utils import cpu_triton_utils

    importlib.reload(cpu_triton_utils)
    current_platform.register_triton_kernel_overrides()


def test_expand_kernel_is_mended_once(fresh_host):
    from vllm.platforms import current_platform
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    from vllm_triforce.patches.expand_kernel import expand_kernel_works, mend_expand_kernel

    assert not expand_kernel_works(), "vLLM has mended this itself: delete the patch"
    assert mend_expand_kernel() is True
    assert mend_expand_kernel() is False
    # Another engine of this process registers vLLM's kernels anew.
    current_platform.register_triton_kernel_overrides()
    assert expand_kernel_works()
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    found = expand_batch_to_tokens(torch.tensor([0.0, 0.5, 0.7]), ends, 5, 0, 1)
    assert torch.equal(found, torch.tensor([1.0, 1.0, 0.7, 0.7, 0.7]))
    found = expand_batch_to_tokens(torch.tensor([3, 4, 5], dtype=torch.int32), ends, 5)
    assert found.tolist() == [3, 3, 5, 5, 5] and found.dtype == torch.int32
    assert expand_batch_to_tokens(torch.tensor([0.6]), torch.tensor([0]), 0).shape == (0,)


def test_ledger_names_every_patch():
    ledger = (ROOT / "patches" / "README.md").read_text()
    for path in [*DIFFS, *(ROOT / "vllm_triforce" / "patches").glob("[!_]*.py")]:
        assert path.name in ledger


def test_an_engine_can_start_beside_llvmlite(monkeypatch):
    """As it is loaded where ngram ran: the host's scan of all modules fails, and then does not."""
    import llvmlite.binding  # noqa: F401
    from vllm.triton_utils import dispatcher

    from vllm_triforce.patches.kernel_rebinding import mend_kernel_rebinding

    class Kernel:
        pass

    original, wrapper = Kernel(), Kernel()
    monkeypatch.setattr(dispatcher, "a_kernel", original, raising=False)
    monkeypatch.delattr(dispatcher, "vars", raising=False)
    with pytest.raises(AttributeError, match="_lib_fn_wrapper"):
        dispatcher._rebind_kernels([(original, wrapper)])
    for _ in range(2):
        mend_kernel_rebinding()
    dispatcher._rebind_kernels([(original, wrapper)])
    assert dispatcher.a_kernel is wrapper
