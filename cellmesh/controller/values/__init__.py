"""Values that the controller sends to ranks, whole or sharded, and gathers or reduces."""
