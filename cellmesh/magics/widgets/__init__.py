"""What is drawn in the notebook: one module a widget, its JavaScript beside it under the same
name.
"""
