"""Device functions that the kernels share."""
