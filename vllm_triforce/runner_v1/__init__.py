"""The levels on the host, for Model Runner V1, whose batches are ragged. ``triforce.py`` is the
algorithm; each level is a file of its own."""
