"""The mesh dashboard: a widget that shows what each rank does."""
