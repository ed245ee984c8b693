"""Converts model folders: merges an adapter, or quantises the experts."""
