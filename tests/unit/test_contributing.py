"""Promise: CONTRIBUTING's recipes are enough. Each is followed literally, on a copy."""

import re
import shutil
import sys

import pytest

from tests import child
from tests.models import ROOT

pytestmark = pytest.mark.slow
NO_CACHE = ("-p", "no:cacheprovider")

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
    return child.run(sys.executable, *command, cwd=folder, timeout=600).stdout


@pytest.mark.thorough
def test_a_policy_is_one_file(copy):
    """Configuration and lab find the policy, and the tests of all policies run on it."""
    (copy / "vllm_triforce" / "selection" / "oldest.py").write_text(POLICY.lstrip())
    asked = "from vllm_triforce.config import TriForceConfig as C; C(selection='{}')"
    run(copy, "-c", asked.format("oldest"))
    lab = "from vllm_triforce_bench.lab.policies import POLICIES as P; print(*P.values())"
    assert "OldestPolicy" in run(copy, "-c", lab)
    tests = ("tests/unit/test_selection.py", "tests/bench/test_lab.py", "-k", "oldest", *NO_CACHE)
    assert re.search(r"\b(1\d|2\d) passed", run(copy, "-m", "pytest", "-v", *tests))
    file = copy / "vllm_triforce" / "selection" / "oldest.py"
    misnamed = file.rename(file.with_name("eldest.py"))
    with pytest.raises(AssertionError, match=r"Give the class the name of its file"):
        run(copy, "-c", lab)
    misnamed.unlink()
    with pytest.raises(AssertionError, match="'quest' or 'retrieval' or 'streaming'"):
        run(copy, "-c", asked.format("oldest"))


ON_HOST, ON_DEVICE = "tests/parity/test_host.py", "tests/parity/test_device.py"


@pytest.mark.thorough
def test_a_source_of_drafts_is_one_file_and_one_for_the_device(copy):
    """The promises of all sources are tested with it on both runners."""
    asked = "from vllm_triforce.config import TriForceConfig as C; C(draft_sources='repeat')"
    with pytest.raises(AssertionError, match="'draft_model' or 'head' or 'prompt_lookup'"):
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
