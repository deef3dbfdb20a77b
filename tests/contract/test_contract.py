"""Promise: what we lean on in vLLM is found, and when it moves a test says what moved.

Source alone is read, so vLLM 0.33.0 is compared with the installed one without being installed: the
facts of its source are kept in vllm-0.33.0.json (``tools/vllm_facts.py``).
"""

from tests.contract import contract

NEXT_RELEASE = "0.33.0"


def test_both_releases_keep_the_contract():
    moved = contract.complaints(contract.load(NEXT_RELEASE))
    assert not moved, "\n".join(moved)
