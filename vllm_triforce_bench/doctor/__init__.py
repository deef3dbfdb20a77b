"""``vllm-triforce doctor``: TriForce on this machine and with a model, before weights load.

``installation`` checks versions and patches, ``engine`` makes the configuration as ``vllm serve``
does, ``layers`` builds the model without weights, ``prediction`` is arithmetic, ``server`` reads a
running server, ``text`` prints the report.
"""
