"""Block indexes and work lists: the listed blocks of a mask, which of them are full, and the elements of the others."""
