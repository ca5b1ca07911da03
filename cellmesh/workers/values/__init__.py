"""Pushed and gathered values on a rank: cuts out the rank's part of a whole tensor."""
