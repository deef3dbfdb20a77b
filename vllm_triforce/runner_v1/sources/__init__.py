"""Draft sources of level 1: each module but ``source.py`` defines one, by the module's name.

CONTRIBUTING.md explains how to add one; ``config/draft_sources.py`` is the registry.
"""
