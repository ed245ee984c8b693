"""The scheduled backward in Gluon, for Hopper: producer, consumers and the launch."""
