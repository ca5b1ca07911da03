"""Renders static tables and pictures as HTML and text."""
