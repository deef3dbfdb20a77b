"""The loop of ``runner_v1/speculator.py`` with everything on the device, for Model Runner V2.

Rows have a fixed shape, so that the models' passes are CUDA graphs, and no token is known to the
host: it learns, after as many rounds as are needed at least, only whether more are.
"""
