"""The acceptance lab: how often a sparse cache says what the full one says (docs/lab.md)."""
