"""This package prepares a call for its plan: arrays of other libraries, and masks whose blocks kernels list."""
