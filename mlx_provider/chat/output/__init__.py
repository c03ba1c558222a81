"""A reply's text as content, thoughts and calls."""
