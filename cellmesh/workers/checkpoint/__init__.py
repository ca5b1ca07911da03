"""``%dist_save`` and ``%dist_load`` on a rank: names as one DCP checkpoint, whole or not at all."""
