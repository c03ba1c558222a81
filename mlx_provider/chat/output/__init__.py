"""Splits the text of a reply into content, thoughts and calls."""
