"""Attention over the target's KV cache: dense at level 3, sparse at level 2.

A backend module (``cpu.py``) subclasses the platform's implementation; ``query_recorder.py``
keeps the queries of level 3 that the next selection is made from.
"""
