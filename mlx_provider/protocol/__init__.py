"""What crosses the process border."""
