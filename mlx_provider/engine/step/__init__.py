"""The parts of a step: what it decides, runs and commits."""
