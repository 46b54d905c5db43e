"""Studies of calls: the mass that a sparse mask keeps, surveys of block patterns, rooflines of kernels, and memory."""
