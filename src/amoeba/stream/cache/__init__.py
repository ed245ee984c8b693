"""Which experts are where: tables, the policy that evicts, budgets, and traces to replay. No tensors, no I/O."""
