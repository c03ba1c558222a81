"""What the next step runs, and its expected cost. Imports no mlx."""
