"""Speculative decoding: how many drafts each row gets, and which of them hold."""
