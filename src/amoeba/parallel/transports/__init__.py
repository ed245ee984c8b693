"""How rows are sent between ranks: one file per transport, each with its own `why_not`."""
