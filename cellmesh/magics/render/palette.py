"""The colours of ranks, in all pictures alike; told apart also by the colour-blind, up to eight."""

from __future__ import annotations

import colorsys

# Paul Tol's "bright" scheme and Okabe & Ito's, those of both that show on white and on black.
_FEW = ("#4477aa", "#ee7733", "#228833", "#cc3377", "#009988", "#aa7700", "#8855bb", "#bb4444")


def colour_of(rank: int, num_ranks: int) -> str:
    """A rank's colour, as ``#rrggbb``."""
    if num_ranks <= len(_FEW):
        return _FEW[rank % len(_FEW)]
    red, green, blue = colorsys.hls_to_rgb(rank / num_ranks, 0.48, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"
