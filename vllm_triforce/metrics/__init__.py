"""Counters, and their way to /metrics and the log."""
