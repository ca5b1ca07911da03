"""The widgets in the notebook: a folder for each, its JavaScript beside it under the same name."""
