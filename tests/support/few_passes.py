"""Few timed passes at the load of a tiny model, whose wide and deep ones take most of its load."""

from mlx_provider.serving import calibration

FEW = {
    "DEEP_WIDTHS": (1, 8, 16),
    "SLOW_DEPTHS": (256,),
    "WIDTHS": (1, 4, 8, 16, 32, 64),
    "ROWS": (1, 2),
    "DRAFTS": (),
}
UNTIMED = (calibration, "SLOW_SHARED_DEPTH", 2**40)
"""A shared prefix longer than any context, which is not timed."""
OF_THE_PRODUCT = {name: getattr(calibration, name) for name in FEW}
