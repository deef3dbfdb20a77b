"""TriForce for vLLM: hierarchical speculative decoding of long sequences.

``config`` has the keys, ``scheduler`` and ``worker`` extend vLLM's, ``runner_v1`` and ``runner_v2``
run the loop of ``core``, ``attention`` and ``cache`` are level 2's, ``controller`` chooses
proposals, ``metrics`` counts. docs/architecture.md has the whole layout.
"""

__version__ = "0.1.0"
