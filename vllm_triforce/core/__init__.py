"""Algorithm and helpers that both model runners share."""
