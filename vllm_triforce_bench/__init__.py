"""What measures TriForce and is not needed to serve: ``pip install 'vllm-triforce[bench]'``.

``bench`` runs it beside stock vLLM, ``lab`` replays sparse caches without vLLM,
``gpu_suite`` checks and measures everything on a machine with a GPU.
"""
