"""Tools that measure TriForce; serving needs none: ``pip install 'vllm-triforce[bench]'``.

``bench`` compares TriForce with stock vLLM, ``lab`` replays sparse caches without vLLM, ``doctor``
examines an installation and a model, ``predict`` is its model of time.
"""
