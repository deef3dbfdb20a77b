"""Indices of ``DeviceCounter`` for kernels."""

from vllm.triton_utils import tl

from vllm_triforce.metrics.counters import DeviceCounter

NUM_INNER_ROUNDS = tl.constexpr(int(DeviceCounter.NUM_INNER_ROUNDS))
NUM_LEVEL1_DRAFTED = tl.constexpr(int(DeviceCounter.NUM_LEVEL1_DRAFTED))
NUM_LEVEL1_ACCEPTED = tl.constexpr(int(DeviceCounter.NUM_LEVEL1_ACCEPTED))
NUM_PROPOSALS = tl.constexpr(int(DeviceCounter.NUM_PROPOSALS))
NUM_PROPOSED = tl.constexpr(int(DeviceCounter.NUM_PROPOSED))
NUM_LEVEL2_DRAFTED = tl.constexpr(int(DeviceCounter.NUM_LEVEL2_DRAFTED))
NUM_LEVEL2_ACCEPTED = tl.constexpr(int(DeviceCounter.NUM_LEVEL2_ACCEPTED))
NUM_LEVEL3_REJECTIONS = tl.constexpr(int(DeviceCounter.NUM_LEVEL3_REJECTIONS))
NUM_LEVEL3_STEPS = tl.constexpr(int(DeviceCounter.NUM_LEVEL3_STEPS))
NUM_NAN_REQUESTS = tl.constexpr(int(DeviceCounter.NUM_NAN_REQUESTS))
NUM_DIRECT_PROPOSALS = tl.constexpr(int(DeviceCounter.NUM_DIRECT_PROPOSALS))
NUM_STAGED_BYTES = tl.constexpr(int(DeviceCounter.NUM_STAGED_BYTES))
NUM_POOL_BLOCKS = tl.constexpr(int(DeviceCounter.NUM_POOL_BLOCKS))
NUM_POOL_HITS = tl.constexpr(int(DeviceCounter.NUM_POOL_HITS))
NUM_POOL_BYTES = tl.constexpr(int(DeviceCounter.NUM_POOL_BYTES))
