"""The families of kernels, each an object that says what it serves and which launches a call takes."""
