"""The host launches the next pass before it reads the tokens of the previous one."""

from itertools import count

import pytest

from host_gap import SAMPLING, ImaginedDevice, decoding, gaps
from mlx_provider.families.text import TextModel

STEPS = 12


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_device_that_is_slower_than_the_host_never_waits(
    qwen3: TextModel, rows: int, sampling: str
) -> None:
    """Each read of the host's clock advances it by one second."""
    engine = decoding(qwen3, rows, SAMPLING[sampling], STEPS)
    device = ImaginedDevice(seconds=1000, host=map(float, count()).__next__)
    assert gaps(engine, device, STEPS) == [0] * STEPS
    assert device.waited > 0
