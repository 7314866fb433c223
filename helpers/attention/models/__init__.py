"""Models that run on the course's kernels, in NumPy or CuPy."""
