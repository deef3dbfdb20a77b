"""Where level 1's tokens come from: each further module here defines a source, of its name.

CONTRIBUTING.md tells how to add one; ``config/draft_sources.py`` is the registry.
"""
