"""Measures cellmesh beside its peers and beside the floors that nothing can go under, in one
run.
"""
