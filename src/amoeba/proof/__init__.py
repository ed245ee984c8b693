"""The truth and how every backend is held against it."""
