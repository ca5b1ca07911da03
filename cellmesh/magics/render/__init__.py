"""Static tables and pictures, as HTML and text."""
