"""Model folders written anew: an adapter merged in, or the experts quantised."""
