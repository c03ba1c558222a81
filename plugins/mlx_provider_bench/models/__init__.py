"""Model folders with random weights."""
