"""`mlx-provider serve`."""

import os
from pathlib import Path

import pytest

from command_line import invoke


@pytest.mark.parametrize("command", ["serve", "chat", "cache"])
def test_a_key_on_the_command_line_is_refused_with_the_remedy(command: str) -> None:
    result = invoke(command, "--api-key", "secret")
    assert result.exit_code == 2
    assert "--api-key-file" in result.stderr


def test_serve_passes_the_path_of_the_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, argv: started.append(argv))
    invoke("serve", "--port", "0", "--api-key-file", str(tmp_path / "key"))
    ((*_, port, zero, option, file),) = started
    assert [port, zero, option, file] == ["--port", "0", "--api-key-file", str(tmp_path / "key")]
