"""Benchmarks that need a checkout: they lean on ``tests`` and are in no wheel."""
