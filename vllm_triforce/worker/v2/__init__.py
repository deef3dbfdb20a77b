"""Model Runner V2: our speculator behind vLLM's own interface of one."""
