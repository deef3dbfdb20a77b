"""``vllm-triforce doctor``: TriForce on this machine and with a model, before weights load.

``installation`` checks versions and patches, ``engine`` makes the configuration as ``vllm serve``
does, ``layers`` builds the model without weights, ``memory`` and ``prediction`` are arithmetic,
``text`` prints the report.
"""
