"""What a sparse mask keeps, which block patterns keep most, what binds a kernel, and how many bytes a call takes."""
