"""The reference: plain torch in any dtype (fp64 in tests), forward and the written-out backward. Slow on purpose."""
