"""Model Runner V1: our drafter in its place, and steps on stock vLLM's path."""
