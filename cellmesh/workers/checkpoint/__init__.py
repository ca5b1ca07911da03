"""Does ``%dist_save`` and ``%dist_load`` on a rank: one DCP checkpoint of variables, written whole
or not at all.
"""
