"""Replies read piece by piece, for tests of parsers."""

from ..chat.output.whole_reply import WholeReply, put_together, read_chunks

__all__ = ["WholeReply", "put_together", "read_chunks"]
