"""What levels 1 and 2 keep beside vLLM's KV cache, and which of its blocks level 2 reads."""
