"""The scheduled backward in plain Triton: tickets on the device, the kernel and its launch."""
