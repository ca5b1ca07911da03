"""``%dist_save`` and ``%dist_load`` on a rank: one DCP checkpoint of names, written whole or not
at all.
"""
