"""The device's work: which rows decode together, and how their tokens are drawn."""
