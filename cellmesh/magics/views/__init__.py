"""The widgets in the notebook: a folder for each, with its JavaScript under the same name."""
