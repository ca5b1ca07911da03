"""Progress bars of user code's: their numbers travel, in place of the lines that they would
draw.
"""
