"""Errors by the codes that they cross a socket with."""

from mlx_provider.errors import RequestFailed, error_classes, from_code


def test_an_error_class_of_a_plugin_does_not_replace_that_of_its_code() -> None:
    class Theirs(RequestFailed):
        """An error with the code of its parent."""

    assert Theirs.code == RequestFailed.code
    assert type(from_code("request_failed", "why")) is RequestFailed
    assert Theirs not in error_classes().values()
