"""`python -m mlx_provider.cli`, for callers that do not know where the script `mlx-provider` is."""

from . import main

main()
