"""Device code that the kernels of several ops share."""
