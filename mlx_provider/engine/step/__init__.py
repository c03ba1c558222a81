"""The parts of a step: schedule, run, commit."""
