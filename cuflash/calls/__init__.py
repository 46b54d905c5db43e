"""Calls before they meet a plan: arrays of other libraries, and masks whose blocks kernels list."""
