"""Completion and help for what lives on ranks, and of the magics' options."""
