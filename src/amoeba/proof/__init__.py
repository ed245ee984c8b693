"""The fp64 reference, and how every backend is compared with it."""
