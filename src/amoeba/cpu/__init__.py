"""The CPU core: a small C++ library, compiled on first use for the machine it runs on."""
