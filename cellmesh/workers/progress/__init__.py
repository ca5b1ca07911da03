"""Progress bars of user code: their numbers are sent instead of the lines that they would draw."""
