"""Faults planted in the sources, the guards that must see them, and one runner for all."""
