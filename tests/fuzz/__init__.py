"""A fuzzer: random engines, random streams of requests, stock vLLM beside them.

``python -m tests.fuzz --minutes 10``; CONTRIBUTING.md says what it checks and what it prints.
"""

import os

# Everything in one process; must be set before vLLM is imported.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
