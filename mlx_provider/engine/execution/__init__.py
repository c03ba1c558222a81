"""Device work: the passes of the rows that decode, and the sampling of their tokens."""
