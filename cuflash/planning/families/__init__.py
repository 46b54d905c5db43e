"""The families of kernels, each an object that says what it serves and which launches a call takes."""

SIMT, SM80, SM90, FA1, NAIVE = "simt", "sm80", "sm90", "fa1", "naive"  # folders of kernels_cu, names of kernel=
