"""Widgets that user code makes on a rank."""
