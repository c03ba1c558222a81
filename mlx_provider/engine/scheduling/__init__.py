"""What the next step does, and what it will cost. Imports no mlx."""
