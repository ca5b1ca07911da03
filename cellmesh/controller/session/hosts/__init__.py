"""A mesh on many hosts: the agents of all hosts are used as if they were one."""
