"""Errors by the codes that they cross a socket with."""

from mlx_provider.errors import RequestFailed, error_classes, from_code


def test_a_plugins_error_does_not_take_the_place_of_ours() -> None:
    class Theirs(RequestFailed):
        """It has the code of its parent."""

    assert Theirs.code == RequestFailed.code
    assert type(from_code("request_failed", "why")) is RequestFailed
    assert Theirs not in error_classes().values()
