"""The acceptance lab: agreement of a sparse cache with the full one (docs/lab.md)."""
