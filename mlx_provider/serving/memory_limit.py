"""How much memory this process may use on the device, and how much of it MLX keeps for reuse."""

import mlx.core as mx
import psutil

RESERVE = 0.15
"""Share of the working set that the device recommends, or of its own memory, that stays free: MLX
uses memory that it does not count. On CUDA these are the plans and workspaces of first passes, 3 to
12 GB on an H100 of 80 GB with a model of 8B."""
CUDA_RESERVE = 3 * 2**30
"""Bytes that stay free on any CUDA device: the least that such plans and workspaces took."""
LEAST_SHARE = 0.5
"""Share of the free memory that is used even if the reserve is larger than the rest."""
HOST_SHARE = 0.7
"""Share of the host's memory, if the device does not report its own."""
COMPRESSED = 1 / 8
"""Share of the memory of other programs that counts as free on a Mac, which compresses idle pages
and counts files in its cache as in use."""
POOL = 2 * 2**30
"""Most bytes of freed buffers that MLX keeps for reuse."""
POOL_SHARE = 1 / 16
"""Share of the memory limit that the pool may have at most: a small machine has small passes."""


def available_memory() -> int:
    """Bytes that no other program uses, of a CUDA device (mlx 0.32, `device_info`) or machine."""
    free = mx.device_info().get("free_memory")
    unused = free if isinstance(free, int) else psutil.virtual_memory().available
    return int(unused + mx.get_active_memory() + mx.get_cache_memory())


def memory_limit(chosen: int | None) -> int:
    """Bytes that this process may use on the device: `chosen` by the operator, else a share of the
    working set that Metal recommends, of a CUDA device or of the machine, as far as it is free."""
    if chosen is not None:
        return chosen
    info, free, host = mx.device_info(), available_memory(), psutil.virtual_memory().total
    recommended, card = info.get("max_recommended_working_set_size"), info.get("total_memory")
    if isinstance(recommended, int) and recommended > 0:
        return int(min((1 - RESERVE) * recommended, free + COMPRESSED * (host - free)))
    if isinstance(card, int) and card > 0:
        own, reserve = min(card, free), max(CUDA_RESERVE, int(RESERVE * card))
        return max(int(LEAST_SHARE * own), own - reserve)
    return int(min(HOST_SHARE * host, (1 - RESERVE) * free))


def pool_limit(limit: int) -> int:
    """Most bytes of freed buffers that MLX keeps, for a memory limit of `limit` bytes."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return 0  # the CPU's allocator keeps none (mlx 0.32, backend/no_gpu/allocator.cpp)
    return min(POOL, int(POOL_SHARE * limit))
