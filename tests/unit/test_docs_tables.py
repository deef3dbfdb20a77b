"""Promise: the tables of the pages of keys and metrics are those of the package."""

from tools.docs_tables import stale


def test_tables_of_the_pages_are_current():
    assert not stale(), "run python tools/docs_tables.py"
