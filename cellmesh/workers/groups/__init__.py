"""A rank's process groups: cut when a peer fails, and rebuilt inside the objects that hold them."""
