"""The form of every error that a user sees: what was expected, what was given, what to do.

raise bad_value("top_k", "1 <= top_k <= num_experts (8)", 9, "lower top_k or add experts")
"""


class BadValue(ValueError):
    """An error in our words: code that wraps errors of other packages lets it pass. remedy: its last sentence."""

    remedy: str | None = None


def bad_value(name: str, expected: str, got: object, remedy: str) -> BadValue:
    advice = f"{remedy[0].upper()}{remedy[1:]}."
    error = BadValue(f"{name}: expected {expected}; got {got}. {advice}")
    error.remedy = advice
    return error


def counted(number: int, thing: str) -> str:
    """counted(1, "prompt") is "1 prompt", counted(2, "prompt") "2 prompts"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def one_line(error: BaseException) -> str:
    """What an exception of another package says, in one line, without a full stop; its kind where it says nothing."""
    return " ".join(str(error).split()).rstrip(" .:") or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch or Python found no memory; torch has a class of its own for GPUs only."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


TOLD = "told by the first rank"  # a note on an error that every rank has, and one tells


class RankLost(RuntimeError):
    """Another rank of this process's group did not come, failed, or is gone."""
