"""Levels and adapter of Model Runner V1, whose batches are ragged lists on the host."""
