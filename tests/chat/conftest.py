"""A model without any sense that writes under a grammar."""

import pytest

from mlx_provider.testing.byte_model import ByteModel, byte_model


@pytest.fixture(scope="session")
def model() -> ByteModel:
    """Made once, for its vocabulary takes a while."""
    return byte_model()
