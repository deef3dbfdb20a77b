"""A fuzzer: random engines, random streams of requests, stock vLLM beside them.

``python -m tests.fuzz --minutes 10``; CONTRIBUTING.md says what it checks and what it prints.
"""

import tests.conftest  # noqa: F401, the environment of all tests
