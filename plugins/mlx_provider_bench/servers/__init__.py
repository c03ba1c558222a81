"""Servers of ours and of others, asked over HTTP."""
