"""Runs plans on arrays: on the host, on a GPU, and on the simulator of one."""
