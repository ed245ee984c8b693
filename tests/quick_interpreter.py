"""Triton's interpreter at three times its speed: it computes the same, without what it does at every call for nothing.

    quick_interpreter.install()        # once, after TRITON_INTERPRET=1 and before the first launch

Of a layer's pass, two thirds of the time go into six things. At every call of a function of ours, also from within
another, it looks through all members of `triton.language` for what to replace by its own; these are found once here,
and replaced once a launch. At every integer operation it computes whether it overflows and throws the answer away, as
its `debug` is off. For every tensor it writes down a table of dtypes, and works out again what follows from its type:
shape and number of elements, in objects of their own. The xor of which `tl.sort` is made goes element by element. And
every argument of every operation is looked at four times for whether it is a constexpr. Where a version of Triton does
these differently, it stays as slow as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import numpy as np


def install() -> None:
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    if all(hasattr(interpreter, name) for name in ("_patch_builtin", "_patch_attr", "_get_np_dtype")):
        _find_builtins_once(interpreter)
        _remember_dtypes(interpreter)
        _remember_types(interpreter.tl)
        _take_numbers_out_of_arrays(interpreter)
        if hasattr(interpreter, "_LangPatchScope"):
            _replace_once_a_launch(interpreter)
        if hasattr(interpreter.tl.standard, "_xor_combine"):
            _xor_at_once(interpreter)
        if hasattr(interpreter.tl.core, "_unwrap_if_constexpr"):
            _unwrap_at_first_sight(interpreter.tl.core)
        builder = interpreter.interpreter_builder
        if not builder.options.debug:
            builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _find_builtins_once(interpreter: Any) -> None:
    is_builtin = interpreter.tl.core.is_builtin

    @functools.cache
    def builtins_of(package: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(package: Any, *more: Any) -> None:
        found = builtins_of(package)
        if found and is_builtin(getattr(package, found[0][0])):  # else the call that led here has replaced them all
            for name, member in found:
                interpreter._patch_attr(package, name, member, *more)

    tl = interpreter.tl
    for package in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        builtins_of(package)  # before any of them is replaced
    interpreter._patch_builtin = patch_builtin


def _take_numbers_out_of_arrays(interpreter: Any) -> None:
    """As `range` needs them: Triton before 3.7 leaves that to NumPy, which refuses from 2.4 on."""
    replace = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, *scope: Any) -> None:
        replace(tensor, *scope)
        for each in scope:
            each.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor


def _replace_once_a_launch(interpreter: Any) -> None:
    replace, tl = interpreter._patch_lang, interpreter.tl

    @functools.cache
    def languages(function: Any) -> list[Any]:
        return [value for value in function.__globals__.values() if value is tl or value is tl.core]

    def patch_lang(function: Any) -> Any:
        found = languages(function)
        if found and all(language.static_assert.__name__ == "_new_static_assert" for language in found):
            return interpreter._LangPatchScope()  # the launch that led here has replaced all and will put it back
        return replace(function)

    interpreter._patch_lang = patch_lang


def _xor_at_once(interpreter: Any) -> None:
    operations, combine = interpreter.ReduceOps, interpreter.tl.standard._xor_combine
    reduce = operations.apply_impl

    def apply_impl(self: Any, given: Any) -> Any:
        if self.combine_fn is not combine:
            return reduce(self, given)
        found = np.bitwise_xor.reduce(given[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(found, given[0].dtype)

    operations.apply_impl = apply_impl


def _unwrap_at_first_sight(core: Any) -> None:
    unwrap, constexpr = core._unwrap_if_constexpr, core.constexpr
    bare = {core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None)}

    def unwrap_if_constexpr(value: Any) -> Any:
        kind = value.__class__
        if kind in bare:
            return value
        return value.value if kind is constexpr else unwrap(value)

    core._unwrap_if_constexpr = unwrap_if_constexpr


def _remember_dtypes(interpreter: Any) -> None:
    written_down, known = interpreter._get_np_dtype, {}

    def numpy_dtype(kind: Any) -> Any:
        if kind.name not in known:
            known[kind.name] = written_down(kind)
        return known[kind.name]

    interpreter._get_np_dtype = numpy_dtype


def _remember_types(tl: Any) -> None:
    """Fields that follow from a type are found by the first object of that type."""
    new_tensor, new_block = tl.tensor.__init__, tl.block_type.__init__
    of_tensors: dict[str, dict[str, Any]] = {}
    of_blocks: dict[tuple[Any, ...], dict[str, Any]] = {}

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in of_tensors:
            new_tensor(self, handle, type)
            of_tensors[type.name] = dict(vars(self))
        vars(self).update(of_tensors[type.name], handle=handle, type=type)

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        if not all(size.__class__ is int for size in shape):
            new_block(self, element_ty, shape)
            return
        key = (element_ty.name, *shape)
        if key not in of_blocks:
            new_block(self, element_ty, shape)
            of_blocks[key] = dict(vars(self))
        vars(self).update(of_blocks[key], element_ty=element_ty)

    tl.tensor.__init__, tl.block_type.__init__ = tensor, block
