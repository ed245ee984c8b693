"""The one shape of an error that a user sees: what was expected, what came, what to do.

raise bad_value("top_k", "1 <= top_k <= num_experts (8)", 9, "lower top_k or add experts")
"""


def bad_value(name: str, expected: str, got: object, remedy: str) -> ValueError:
    return ValueError(f"{name}: expected {expected}; got {got}. {remedy[0].upper()}{remedy[1:]}.")
