"""Planted faults in the sources, the guards that must detect them, and one runner for all."""
