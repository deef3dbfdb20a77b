"""``vllm-triforce doctor``: what TriForce would do here, and with a model, before any weights load.

``installation`` looks at versions and wrappers, ``engine`` makes the configuration as ``vllm
serve`` does, ``layers`` builds the model without weights, ``memory`` and ``pays`` are arithmetic,
``text`` prints it.
"""
