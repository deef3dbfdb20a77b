"""Where vLLM lets us in: workers that swap the model runner's speculator."""
