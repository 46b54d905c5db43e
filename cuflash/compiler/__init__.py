"""Makes machine code of specifications."""
