"""Draft sources of level 1: each module but ``source.py`` defines the source of its name.

CONTRIBUTING.md explains how to add one; ``config/draft_sources.py`` is the registry.
"""
