"""vLLM workers that replace the model runner's speculator by TriForce's."""
