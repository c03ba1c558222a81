"""Texts for people: sizes, and log entries that no text of a client or plugin can break."""

import copy
import logging


class Trace(str):
    """An argument of a log call whose lines follow the entry, indented, such as a traceback."""


class LogLines(logging.Formatter):
    """Escapes unprintable characters, so that no text can start a line or control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        entry = copy.copy(record)
        entry.exc_info = entry.exc_text = entry.stack_info = None
        given = record.args if isinstance(record.args, tuple) else ()
        traces = [arg for arg in given if isinstance(arg, Trace)]
        if traces:
            entry.args = tuple("" if isinstance(arg, Trace) else arg for arg in given)
        if record.exc_info:
            traces.append(Trace(self.formatException(record.exc_info)))
        lines = (line for trace in traces for line in trace.splitlines() if line.strip())
        first = printable(super().format(entry).rstrip("\n"))
        return "\n    ".join([first, *map(printable, lines)])


def printable(text: str) -> str:
    """`text` with control characters, line ends and half surrogates escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def format_size(number: int) -> str:
    """A number of bytes as `1.5 GB`, or as `1.5 MB` below 0.1 GB."""
    return f"{number / 1e9:.1f} GB" if number >= 10**8 else f"{number / 1e6:.1f} MB"


def log_to_stderr(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(LogLines("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
