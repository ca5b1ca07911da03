"""What stands still: tables and pictures, as HTML and text."""
