"""Compiles kernels for a GPU that is not here, in a process of its own: Triton's interpreter cannot compile.

found = compiled_by(__file__, tmp_path, "up", "down")      # a test: the JSON that its file prints as a program
made = compile_for(kernel, arguments, {"BLOCK": 64, "num_warps": 4})         # the program
found = figures(made)
"""

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

# What a block may have of a Hopper multiprocessor's 228 KB, by NVIDIA's table of compute capabilities.
SHARED_BYTES = 232448
TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip


def compiled_by(program: str, cache: Path, *names: str) -> dict[str, Any]:
    """What a file prints as a program."""
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    surroundings |= {
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path),
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_DEFAULT_FP_FUSION": "0",  # as it will be with Triton 3.10
    }
    command = [sys.executable, program, *names]
    finished = subprocess.run(command, env=surroundings, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def compile_for(
    kernel: Any,
    arguments: Iterable[Any],
    constants: dict[str, Any],
    capability: int = 90,
    gluon: bool = False,
    divisible: bool = True,
) -> Any:
    """For what it would be launched with. constants: those that are no arguments are options of the compiler.
    divisible: pointers begin at multiples of 16 bytes, and what is a multiple of 16 is known to be one."""
    names, constants, types, aligned = kernel.arg_names, dict(constants), {}, []
    options = {name: constants.pop(name) for name in list(constants) if name not in names}
    for name, parameter, argument in zip(names, kernel.params, arguments, strict=False):
        if parameter.is_constexpr or argument is None or (isinstance(argument, int) and argument == 1):
            constants[name] = argument
            continue
        types[name] = _type_of(argument)
        if divisible and (isinstance(argument, torch.Tensor) or (isinstance(argument, int) and argument % 16 == 0)):
            aligned.append(name)
    return compile_as(kernel, types, constants, aligned, capability, gluon, **options)


def compile_as(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    aligned: Iterable[str] | None = None,
    capability: int = 90,
    gluon: bool = False,
    **options: Any,
) -> Any:
    """types: of the arguments that are no constants. aligned: multiples of 16 among them, by default all pointers."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    from amoeba.kernels.launch import OPTIONS

    names = kernel.arg_names
    if aligned is None:
        aligned = [name for name in names if types.get(name, "").startswith("*")]
    source = (GluonASTSource if gluon else ASTSource)(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return compile(source, target=GPUTarget("cuda", capability, 32), options=OPTIONS | options)


def _type_of(argument: Any) -> str:
    if isinstance(argument, torch.Tensor):
        return f"*{TYPES[argument.dtype]}"
    if isinstance(argument, int | float):
        return "fp32" if isinstance(argument, float) else "i32"
    layout = f",{argument.layout!r}" if hasattr(argument, "layout") else ""
    return f"tensordesc<{TYPES[argument.base.dtype]}{list(argument.block_shape)}{layout}>"


def told_by(tool: str, made: Any, *options: str) -> str:
    """tool: cuobjdump or nvdisasm."""
    from triton import knobs

    path = Path(os.environ["TRITON_CACHE_DIR"]) / "kernel.cubin"
    path.write_bytes(made.asm["cubin"])
    command = [getattr(knobs.nvidia, tool).path, *options, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(made: Any) -> dict[str, int]:
    """Of a thread: its registers, and bytes in memory that did not fit into them."""
    told = told_by("cuobjdump", made, "-res-usage")
    return {name.lower(): int(re.findall(rf"{name}:(\d+)", told)[0]) for name in ("REG", "STACK")}


def figures(made: Any) -> dict[str, int]:
    code = told_by("nvdisasm", made, "-c")
    instructions = re.findall(r"\*/ +(?:@!?\w+ +)?([A-Z][A-Z0-9]+)", code)
    steps = _steps(code)
    local = [at for at, name in enumerate(instructions) if name in ("LDL", "STL")]
    products = [at for at, name in enumerate(instructions) if name in ("HGMMA", "QGMMA")]
    # those further apart are of two loops
    loops = [(one, other) for one, other in itertools.pairwise(products) if other - one < 200]
    return {
        "wgmma": made.asm["ptx"].count("wgmma.mma_async"),
        "shared": made.metadata.shared,
        "stack_bytes": resources(made)["stack"],
        "local_accesses": len(local),
        "slow_roundings": instructions.count("F2F"),
        "steps": len(steps),
        "local_accesses_in_steps": sum(len(re.findall(r"\b(?:LDL|STL)\b", loop)) for loop in steps),
        "waits_in_steps": sum(loop.count("WARPGROUP.DEPBAR") for loop in steps),
        "turns_in_steps": sum(loop.count("BAR.ARV") for loop in steps),
        "local_accesses_between_products": sum(one < at < other for at in local for one, other in loops),
    }


def _steps(code: str) -> list[str]:
    """Loops that multiply, those over tiles left out: one for each warpgroup."""
    lines = code.splitlines()
    at = {line[:-1]: number for number, line in enumerate(lines) if re.fullmatch(r"\.L_x_\d+:", line)}
    ends = [(at[to[1]], end) for end, line in enumerate(lines) if (to := re.search(r"BRA `\((\.L_x_\d+)\)", line))]
    loops = ["\n".join(lines[first : end + 1]) for first, end in ends if 0 < end - first < 400]
    return [loop for loop in loops if re.search("[HQ]GMMA", loop)]
