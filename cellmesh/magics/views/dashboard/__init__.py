"""The mesh dashboard: a widget that shows the state of each rank."""
