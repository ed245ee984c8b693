"""The scheduled backward: tasks, what each waits for, and the order in which they are handed out (docs/tasks.md)."""
