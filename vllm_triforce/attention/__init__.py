"""Attention over the target's KV cache: dense at level 3, sparse at level 2.

``base.py`` is the interface to the levels. ``platforms.py`` chooses ``cpu.py`` or ``gpu/``: each
replaces a layer's implementation by a subclass of it.
"""
