"""Promise: every run-time change is needed, idempotent, and its upstream diff still applies."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from vllm.platforms import current_platform
from vllm.triton_utils import dispatcher
from vllm.utils import cpu_triton_utils
from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

from tests.child import run
from tests.contract.contract import installed
from tests.contract.test_contract import NEXT_RELEASE
from tests.models import ROOT
from tools.docs_tables import stale
from tools.ledger import LEDGER, written
from tools.vllm_source import fetch
from vllm_triforce.vllm_patches.cpu_build import (
    expand_kernel_works,
    fix_expand_kernel,
    fix_kernel_rebinding,
)
from vllm_triforce.vllm_patches.patch import Patch
from vllm_triforce.vllm_patches.swaps import Swap

DIFFS = sorted((ROOT / "patches").glob("*.diff"))


@pytest.mark.parametrize("diff", DIFFS, ids=lambda path: path.name)
def test_upstream_diff_applies_to_the_installed_vllm(diff):
    assert_applies(diff, installed())


@pytest.mark.parametrize("diff", DIFFS, ids=lambda path: path.name)
def test_upstream_diff_applies_to_the_next_release(diff):
    """Read the files out of the release's wheel, and keep them in build/."""
    folder = ROOT / "build" / f"vllm-{NEXT_RELEASE}"
    touched = re.findall(r"^\+\+\+ b/vllm/(.+)$", diff.read_text(), re.M)
    try:
        vllm = fetch(NEXT_RELEASE, folder, touched)
    except (RuntimeError, OSError) as error:
        pytest.skip(f"the source of vLLM {NEXT_RELEASE} cannot be fetched: {error}")
    assert_applies(diff, vllm)


def assert_applies(diff: Path, vllm: Path) -> None:
    run("patch", "--dry-run", "--batch", "--forward", "-p1", "-d", vllm.parent, "-i", diff)


@pytest.fixture()
def fresh_host():
    """Register vLLM's kernel as the CPU platform does."""
    fix_kernel_rebinding()  # another test of this process may have loaded numba
    importlib.reload(cpu_triton_utils)
    current_platform.register_triton_kernel_overrides()


def test_expand_kernel_is_mended_once(fresh_host):
    assert not expand_kernel_works(), "vLLM has mended this itself: delete the patch"
    assert fix_expand_kernel() is True
    assert fix_expand_kernel() is False
    # Another engine of this process registers vLLM's kernels anew.
    current_platform.register_triton_kernel_overrides()
    assert expand_kernel_works()
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    found = expand_batch_to_tokens(torch.tensor([0.0, 0.5, 0.7]), ends, 5, 0, 1)
    assert torch.equal(found, torch.tensor([1.0, 1.0, 0.7, 0.7, 0.7]))
    found = expand_batch_to_tokens(torch.tensor([3, 4, 5], dtype=torch.int32), ends, 5)
    assert found.tolist() == [3, 3, 5, 5, 5] and found.dtype == torch.int32
    assert expand_batch_to_tokens(torch.tensor([0.6]), torch.tensor([0]), 0).shape == (0,)


def test_ledger_is_current():
    ledger = LEDGER.read_text()
    assert written(ledger) == ledger, "run python tools/ledger.py"
    name = "`GPUModelRunner (V1).drafter`"
    for fault in (
        ledger.replace(name, "`Gone.drafter`"),
        ledger.replace("| they read one key |", "| |"),
    ):
        with pytest.raises(ValueError, match=r"without a swap|no condition"):
            written(fault)
    for path in [*DIFFS, *(ROOT / "vllm_triforce" / "vllm_patches").glob("[!_]*.py")]:
        assert path.name in ledger


def test_tables_of_keys_and_metrics_are_current():
    assert not stale(), "run python tools/docs_tables.py"


def test_a_patch_is_applied_once_and_keeps_the_kind_of_method(monkeypatch):
    host = ModuleType("a_host")

    class Host:
        plain = lambda self, number: number  # noqa: E731
        made = classmethod(lambda cls, number: number)
        alone = staticmethod(lambda number: number)
        given = property(lambda self: 3)

    host.Host = Host
    monkeypatch.setitem(sys.modules, "a_host", host)

    def doubled(original, *arguments):
        return 2 * original(*arguments)

    def patch(attribute, *parameters):
        return Patch("a_host", "Host", attribute, doubled, parameters, "why", "until")

    kinds = {"plain": ("self", "number"), "made": ("cls", "number"), "alone": ("number",)}
    patches = [patch(name, *names) for name, names in {**kinds, "given": ("self",)}.items()]
    assert [p.missing_name() for p in patches] == [None] * 4
    assert [p.signature_mismatch() for p in patches] == [None] * 4
    assert [p.apply() for p in patches] == [True] * 4
    assert [p.apply() for p in patches] == [False] * 4
    ours = Host.plain
    Host.plain = lambda self, number: ours(self, number)  # another plugin's, which says nothing
    assert not patches[0].apply()
    assert (Host().plain(2), Host.made(2), Host.alone(2), Host().given) == (4, 4, 4, 6)
    assert "Host.plain(self, word), but" in patch("plain", "self", "word").signature_mismatch()
    absent = patch("stop", "self")
    assert absent.missing_name() == "Host.stop" and absent.signature_mismatch() is None
    assert not absent.apply()


def test_a_swap_that_nobody_would_read_is_refused():
    swap = Swap("Host.drafter")
    with pytest.raises(AttributeError, match=r"sets 'drafter'.*drop method='triforce'"):
        swap.set(SimpleNamespace(), 1)
    assert swap.set(host := SimpleNamespace(drafter=1), 2) == 1 and host.drafter == 2


def test_an_engine_can_start_beside_llvmlite(monkeypatch):
    """vLLM's scan of all modules fails where ngram loaded llvmlite."""
    import llvmlite.binding  # noqa: F401

    class Kernel:
        pass

    rebind, original, wrapper = dispatcher._rebind_kernels, Kernel(), Kernel()
    monkeypatch.setattr(dispatcher, "a_kernel", original, raising=False)
    monkeypatch.delattr(dispatcher, "vars", raising=False)
    with pytest.raises(AttributeError, match="_lib_fn_wrapper"):
        rebind([(original, wrapper)])
    for _ in range(2):
        fix_kernel_rebinding()
    rebind([(original, wrapper)])
    assert dispatcher.a_kernel is wrapper
