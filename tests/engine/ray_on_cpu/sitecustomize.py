"""On ``PYTHONPATH`` of Ray's processes: vLLM's CPU platform takes part in Ray's count of GPUs.

vLLM refuses Ray on the CPU ("current platform cpu does not support ray") because the platform
names no resource of Ray's. With one named, its Ray executor runs there, so that TriForce can be
tried with it.
"""

import importlib.abc
import importlib.machinery
import sys

_MODULE = "vllm.platforms.cpu"


class _OnceLoaded(importlib.abc.MetaPathFinder):
    """Changes the platform when it is imported, without importing vLLM before that."""

    def find_spec(self, name, path, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module.CpuPlatform.ray_device_key = "GPU"

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _OnceLoaded())
