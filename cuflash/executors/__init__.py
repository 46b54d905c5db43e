"""Executors, which run plans on arrays: on the host, on a GPU, and on a simulated GPU."""
