"""Promise: CONTRIBUTING's recipes are enough. Each is followed literally, on a copy."""

import re
import shutil
import subprocess
import sys

import pytest

from tests.models import ROOT

pytestmark = pytest.mark.slow

POLICY = '''
"""Oldest: the chunks that come first."""

import torch

from vllm_triforce.selection.policy import SelectionPolicy


class OldestPolicy(SelectionPolicy):
    """Oldest.

    Mechanism: the chunks that come first in the context.
    """

    name = "oldest"

    def score(self, query, summaries, num_chunks):
        places = torch.arange(num_chunks, dtype=torch.float32, device=query.device)
        return -places.expand(*query.shape[:-2], 1, num_chunks)
'''

BACKEND = '''
"""Attention on an abacus: a CPU that counts what it is asked for."""

from collections import Counter

from vllm_triforce.attention.platforms.cpu import CPUPlatform

ASKED: Counter[str] = Counter()


class AbacusBackend(CPUPlatform):
    """Over the CPU's kernels, in the place of the CPU's own."""

    name = "abacus"
    platforms = ("an abacus",)

    @staticmethod
    def retrieval():
        from vllm_triforce.attention.cpu.retrieval import CPURetrievalAttention

        class AbacusRetrievalAttention(CPURetrievalAttention):
            def build(self, query_lens, seq_lens, block_tables):
                ASKED["build"] += 1
                return super().build(query_lens, seq_lens, block_tables)

        return AbacusRetrievalAttention
'''
FITS = """
    @staticmethod
    def fits(platform):
        return platform.is_out_of_tree()
"""
CHOSEN = """
from tests.unit.test_attention import platform_for, platform
print("chosen:", platform_for(platform("CPU")).name, platform_for(platform("OOT")).name)
platform_for(platform("TPU"))
"""
TESTS_AND_ENGINE = """
import sys
import pytest
if failed := pytest.main(sys.argv[1:]):
    sys.exit(failed)
from pathlib import Path
from tests.conftest import Engines, triforce
from tests.generation import generate
from tests.models import make_llama
from tests.unit.test_attention import platform_for, current_platform
from vllm_triforce.attention.platforms.abacus import ASKED
print("chosen:", platform_for(current_platform).name)
llm = Engines().get(make_llama(Path("model")), triforce(retrieval_budget=256), max_model_len=1024)
generate(llm, [[*range(2, 50)] * 12], max_tokens=16)
print("asked:", ASKED["build"])
"""


SOURCE = '''
"""Repeat: the newest token, again and again."""

from vllm_triforce.runner_v1.sources.source import Match, TokenSource


class Repeat(TokenSource):
    """Repeat.

    Mechanism: the newest token is followed by itself; trusted more where it just was.
    """

    name = "repeat"
    prior_acceptance = (0.1, 0.4)

    def find(self, token_ids):
        return Match(int(len(token_ids) > 1 and token_ids[-1] == token_ids[-2]))

    def continue_from(self, token_ids, match, count):
        return [int(token_ids[-1])] * count
'''
DEVICE_SOURCE = '''
"""``runner_v1/sources/repeat.py`` on the device."""

from vllm_triforce.runner_v2.sources.source import DraftSourceV2


class DeviceRepeat(DraftSourceV2):
    """Repeat."""

    name = "repeat"

    def draft(self, batch, rows, is_first):
        newest = rows.proposal.gather(1, (rows.length - 1).clamp(min=0)[:, None].long())[:, 0]
        newest = newest.where(rows.length > 0, rows.last_token.long())
        rows.drafted.copy_(newest[:, None].expand_as(rows.drafted))
        rows.num_drafted.fill_(rows.gamma)
'''


@pytest.fixture
def copy(tmp_path):
    for package in ("vllm_triforce", "vllm_triforce_bench"):
        shutil.copytree(ROOT / package, tmp_path / package)
    for folder in ("tests", "tools", "patches", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for file in ("setup.cfg", "pyproject.toml", "README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def run(folder, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_policy_is_one_file(copy):
    """Configuration, both loops, the room for the KV cache and the lab know it, and the tests of
    all policies run on it; a name that is not there says which are."""
    (copy / "vllm_triforce" / "selection" / "oldest.py").write_text(POLICY.lstrip())
    asked = "from vllm_triforce.config import TriForceConfig as C; C(selection='{}')"
    run(copy, "-c", asked.format("oldest"))
    lab = "from vllm_triforce_bench.lab.policies import POLICIES as P; print(*P.values())"
    assert "OldestPolicy" in run(copy, "-c", lab)
    tests = [
        "tests/unit/test_selection.py",
        "tests/bench/test_lab.py",
        "-k",
        "oldest",
        "-p",
        "no:cacheprovider",
    ]
    assert re.search(r"\b(1\d|2\d) passed", run(copy, "-m", "pytest", "-v", *tests))
    file = copy / "vllm_triforce" / "selection" / "oldest.py"
    misnamed = file.rename(file.with_name("eldest.py"))
    with pytest.raises(AssertionError, match=r"Give the class the name of its file"):
        run(copy, "-c", lab)
    misnamed.unlink()
    with pytest.raises(AssertionError, match="'quest' or 'retrieval' or 'streaming'"):
        run(copy, "-c", asked.format("oldest"))


NO_CACHE = ("-p", "no:cacheprovider")
ON_HOST, ON_DEVICE = "tests/parity/test_host.py", "tests/parity/test_device.py"


@pytest.mark.thorough
def test_a_source_of_drafts_is_one_file_and_one_for_the_device(copy):
    """The key, the controller and the loops know it, and the promises of all sources are held to,
    on both runners."""
    asked = "from vllm_triforce.config import TriForceConfig as C; C(draft_sources='repeat')"
    with pytest.raises(AssertionError, match="'draft_model' or 'prompt_lookup'"):
        run(copy, "-c", asked)
    package = copy / "vllm_triforce"
    (package / "runner_v1" / "sources" / "repeat.py").write_text(SOURCE.lstrip())
    run(copy, "-c", asked)
    skipped = "from tests.parity.cases import CASES; print(CASES['greedy-repeat'].skip)"
    assert "V2 drafts on the device, and 'repeat' has no side there" in run(copy, "-c", skipped)
    (package / "runner_v2" / "sources" / "repeat.py").write_text(DEVICE_SOURCE.lstrip())
    its = "repeat and (greedy or straight)"
    found = run(copy, "-m", "pytest", "-rA", ON_HOST, ON_DEVICE, *NO_CACHE, "-k", its)
    for runner in ("test_host", "test_device"):
        assert len(re.findall(rf"PASSED .*{runner}.*-repeat\]", found)) == 2
    assert "has no side" not in found


@pytest.mark.thorough
def test_an_attention_backend_is_one_file(copy):
    """It takes the CPU's place, level 2 of an engine asks it, and the tests of all backends run on
    it; for a platform that there is none of here, it leaves the CPU's in place."""
    file = copy / "vllm_triforce" / "attention" / "backends" / "abacus.py"
    file.write_text(BACKEND.lstrip())
    tests = ["tests/unit/test_attention.py", "-k", "abacus", "-p", "no:cacheprovider"]
    said = run(copy, "-c", TESTS_AND_ENGINE, "-v", *tests)
    asked = re.search(r"asked: (\d+)", said)
    assert "chosen: abacus" in said and asked and int(asked[1]) > 2
    assert re.search(r"\b2\d passed", said)
    file.write_text(BACKEND.lstrip() + FITS)
    with pytest.raises(AssertionError, match=r"chosen: cpu abacus[^$]*, a CPU or an abacus, or"):
        run(copy, "-c", CHOSEN)
