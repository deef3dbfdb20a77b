"""Attention over the target's KV cache: dense at level 3, sparse at level 2.

``base.py`` says what the levels need, ``platforms/`` has a file for each kind of platform, and
``cpu/`` and ``gpu/`` what those two consist of: each takes the place of a layer's implementation
by a subclass of it. ``query_recorder.py`` keeps the queries of level 3 that the next selection is
made from.
"""
