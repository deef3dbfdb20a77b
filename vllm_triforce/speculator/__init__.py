"""The levels. ``triforce.py`` is the algorithm; each level is a file of its own."""
