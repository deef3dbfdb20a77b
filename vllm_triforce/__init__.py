"""TriForce for vLLM: hierarchical speculative decoding of long sequences.

The way of a token, folder by folder: ``config`` (what the user asked for) ->
``worker`` (where vLLM lets us in) -> ``speculator`` (the levels) -> ``attention``
and ``cache`` (what level 2 reads) -> ``verification`` (accept, recover, bonus) ->
``metrics``. See docs/architecture.md.
"""

__version__ = "0.1.0"
