"""The scheduled backward executed on paper: what its tasks compute, a simulator of any schedule, and random cases."""
