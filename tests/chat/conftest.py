"""A model without any sense that writes under a grammar."""

import pytest

from byte_model import byte_model
from mlx_provider.testing.conformance.calls import ByteModel


@pytest.fixture(scope="session")
def model() -> ByteModel:
    """Made once, for its vocabulary takes a while."""
    return byte_model()
