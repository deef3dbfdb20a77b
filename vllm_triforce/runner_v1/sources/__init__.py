"""Draft sources of level 1: each module but ``source.py`` defines one, by the module's name."""
