"""`python -m mlx_provider.cli`, for who does not know where the script `mlx-provider` is."""

from . import main

main()
