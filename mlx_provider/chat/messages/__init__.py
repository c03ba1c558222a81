"""Converts messages of every dialect into the form that templates accept."""
