"""Score functions: Python functions that change each score, and what is made of them."""
