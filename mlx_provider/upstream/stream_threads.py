"""The Linux scheduling policy of the threads of MLX's CPU device.

MLX runs the operations of a stream in a separate thread, woken for each one (mlx 0.32.4,
`mlx/scheduler.h`), possibly on the core of the waking thread. With small arrays, the two then
alternate: measured, 90 context switches for a pass of one layer took a third of the processor time.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def wake_without_preemption() -> None:
    """Let this thread, and the threads that it starts later, not preempt others when they wake up.
    Call it before the first use of MLX in the thread, which starts MLX's thread. No effect if the
    system lacks or refuses the policy."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
