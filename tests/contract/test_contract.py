"""Promise: what we lean on in vLLM is named, and when it moves a test says what moved.

Source alone is read, so vLLM 0.33.0 is checked without being installed: the facts of its source
are kept in vllm-0.33.0.json (``tools/vllm_facts.py``).
"""

from tests.contract import contract

NEXT_RELEASE = "0.33.0"


def test_installed_vllm_keeps_the_contract():
    facts = contract.facts_of(contract.installed(), "the installed one")
    assert not (moved := contract.complaints(facts)), "\n".join(moved)


def test_next_release_keeps_the_contract():
    assert not (moved := contract.complaints(contract.load(NEXT_RELEASE))), "\n".join(moved)


def test_every_file_that_imports_vllm_is_in_the_table():
    users = {surface.user for surface in contract.TABLE}
    loners = contract.users_of_more_than_a_name() - users
    assert not loners, f"{loners} import vLLM: add what they lean on to tests/contract/table_*.py"
    assert not {user for user in users if not (contract.ROOT / user).exists()}


def test_no_entry_is_said_twice():
    said = [(s.file, s.name, s.wanted, s.judge, s.user) for s in contract.TABLE]
    assert len(said) == len(set(said))
