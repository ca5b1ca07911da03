"""A rank's process groups: cut when others will not come, and rebuilt inside the objects that hold
them.
"""
