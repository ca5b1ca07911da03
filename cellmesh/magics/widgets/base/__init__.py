"""What all widgets share: base classes, refreshing."""
