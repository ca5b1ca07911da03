"""The tensor inspector: a widget that shows one value on all ranks."""
