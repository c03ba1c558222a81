"""No text of a stranger begins a line of the log, or steers the terminal that shows it."""

import io
import logging
import sys

import pytest

from engine_process import engine_process
from mlx_provider.isolation import Isolation
from mlx_provider.logs import LogLines, printable

FORGED = "x\n2030-01-01 ERROR forged\r\x1b[2J\x00\u2028\u202e\ud800"
ESCAPED = r"x\n2030-01-01 ERROR forged\r\x1b[2J\x00\u2028\u202e\ud800"


def logged(message: str, *args: object, **options: object) -> str:
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(LogLines("%(levelname)s %(message)s"))
    log = logging.getLogger("test_log_lines")
    log.propagate = False
    log.handlers = [handler]
    log.error(message, *args, **options)
    return handler.stream.getvalue()


@pytest.mark.parametrize("args", [(FORGED,), (ValueError(FORGED),)])
def test_a_log_entry_with_line_ends_stays_one_line(args):
    assert logged("request %s", *args) == f"ERROR request {ESCAPED}\n"
    assert logged(FORGED) == f"ERROR {ESCAPED}\n"


def test_the_lines_of_a_logged_traceback_are_indented_and_escaped():
    with Isolation() as trying:
        raise ValueError(FORGED)
    assert trying.fault is not None
    first, *lines = logged("it failed %s\n%s", "a\nb", trying.fault.trace).splitlines()
    assert first == r"ERROR it failed a\nb"
    assert lines[0] == "    Traceback (most recent call last):"
    assert all(line.startswith("    ") for line in lines)
    assert any("ERROR forged" in line for line in lines)
    assert "\x1b" not in "".join(lines)


def test_the_traceback_of_a_log_entry_is_indented_below_it():
    try:
        raise ValueError(FORGED)
    except ValueError:
        first, *lines = logged("it failed", exc_info=True).splitlines()
    assert first == "ERROR it failed"
    assert len(lines) > 3
    assert all(line.startswith("    ") for line in lines)


def test_printable_text_is_logged_unchanged():
    for text in ("", "ä ß 漢字 🙂 a/b-c_d.e", r"back\slash"):
        assert printable(text) is text


@pytest.mark.skipif(sys.platform == "win32", reason="unix sockets")
def test_an_engine_escapes_request_ids_and_model_names_in_its_log():
    with engine_process({"log_level": "info"}) as running:
        name = FORGED.replace("\0", "").replace("\ud800", "")
        status, _ = running.ask("hello", model=f"/no/{name}", id=name)
        assert status == 404
        assert running.process.stderr is not None
        line = b""
        while b"refused" not in line:
            line = running.process.stderr.readline()
            assert b" INFO " in line, line
    assert line.count(rb"x\n2030-01-01 ERROR forged\r\x1b[2J\u2028\u202e") >= 2
