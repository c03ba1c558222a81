"""`mlx-provider metrics`."""

from collections.abc import Iterator

import pytest

from command_line import invoke, told
from local_server import Handler, serving

TOLD = "# HELP mlx_provider_models_loaded Models.\nmlx_provider_models_loaded 1.0\n"


class Metrics(Handler):
    def do_GET(self) -> None:
        self.answer(TOLD.encode())


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with serving(Metrics) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def run(*arguments: str) -> tuple[int, str]:
    result = invoke("metrics", *arguments)
    return result.exit_code, told(result)


def test_metrics_prints_the_metrics_of_an_engine_or_that_none_answers(engine: str) -> None:
    assert run("--api-base", engine) == (0, TOLD)
    code, said = run("--api-base", "http://127.0.0.1:9")
    assert (code, "no engine answers" in said) == (1, True)
