"""The kernel families: each is an object that checks whether it serves a problem and returns the launches of a call."""
