"""Errors by the codes that they cross a socket with."""

from mlx_provider.errors import MediaError, RequestFailed, error_classes, for_another, from_code


def test_an_error_class_of_a_plugin_does_not_replace_that_of_its_code() -> None:
    class Theirs(RequestFailed):
        """An error with the code of its parent."""

    assert Theirs.code == RequestFailed.code
    assert type(from_code("request_failed", "why")) is RequestFailed
    assert Theirs not in error_classes().values()


def test_an_error_for_another_thread_keeps_no_frame_of_the_failed_call() -> None:
    errors = [MediaError("one"), MediaError("two", brief="b")]
    for error in errors:
        error.__cause__ = ValueError("with frames")
    copied = for_another(MediaError.with_others(errors))
    found = [(error.brief, error.__cause__) for error in (copied, *copied.others)]
    assert found == [("damaged", None), ("b", None)]
