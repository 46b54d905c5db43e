"""How much of attention a sparse mask keeps."""
