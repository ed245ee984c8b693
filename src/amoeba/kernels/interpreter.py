"""Triton's interpreter, where it is older than NumPy: `range` in a kernel needs whole numbers, it has arrays of one.

Triton before 3.7 leaves it to NumPy to take the number out, which refuses from 2.4 on. What is replaced is replaced
again at each launch, by a function of the interpreter: that one is extended.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def take_numbers_out_of_arrays() -> None:
    replace = getattr(interpreter, "_patch_lang_tensor", None)
    if replace is None:
        return

    def patch_lang_tensor(tensor: Any, *scope: Any) -> None:
        replace(tensor, *scope)
        for each in scope:
            each.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor
