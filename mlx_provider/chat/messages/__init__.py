"""Messages of every dialect, in the one form that templates take."""
