"""Lists the blocks of a mask that hold anything: which are full, and what the others hold."""
