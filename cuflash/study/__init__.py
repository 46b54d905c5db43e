"""How much of attention a sparse mask keeps, and which block patterns keep most."""
