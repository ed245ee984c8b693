"""Experts streamed to a GPU: slots on the device over pinned memory over a store."""
