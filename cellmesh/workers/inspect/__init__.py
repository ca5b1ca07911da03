"""Answers the notebook's queries about a rank's values, names and past collectives."""
