"""What is compiled ahead on tensors without memory is what a launch with a driver and real tensors asks for.

In processes of their own: one compiles ahead, another one launches, with fake_driver.c in place of libcuda.

    TRITON_CACHE_DIR=cubins python tests/compiled/test_compiled_ahead.py ahead layer       # a line of JSON
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from test_launches_of_triton import driver_in

HERE = Path(__file__).parent
T, H, I, E, K = 130, 256, 128, 4, 2


def program(cache: Path, *arguments: str | Path, **more: str) -> Any:
    """What this file prints as a program."""
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    surroundings |= {"TRITON_CACHE_DIR": str(cache), "AMOEBA_TUNED": "off"} | more
    surroundings["TRITON_DEFAULT_FP_FUSION"] = "0"  # Triton 3.10's default, which no kernel of ours takes
    finished = subprocess.run([sys.executable, __file__, *arguments], env=surroundings, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, as Triton does")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's own driver is in the process")
@pytest.mark.parametrize("what", ["rows", pytest.param("layer", marks=pytest.mark.thorough)])
def test_launches_find_what_was_compiled_ahead(what: str, tmp_path: Path) -> None:
    library = driver_in(tmp_path)
    kernels = program(tmp_path / "cache", "ahead", what)
    found = program(tmp_path / "cache", "launch", what, str(library), TRITON_LIBCUDA_PATH=str(tmp_path))
    assert len(found) >= (3 if what == "rows" else 10) and {name for name, _ in found} <= set(kernels)
    assert all(hit for _, hit in found), found


def test_the_key_of_a_kernel_does_not_depend_on_what_was_launched_before(tmp_path: Path) -> None:
    """Else a process does not find what another one compiled in another order, as with Triton 3.6 and 3.7."""
    forward, backward = (program(tmp_path, "keys", order) for order in ("forward", "backward"))
    assert len(forward) >= 6 and forward == backward


EXPECTED = {
    "train": {"gemm_kernel", "wgrad_kernel", "_activate_backward", "_combine", "_update", "_sum_of_squares"},
    "generate": {"_up_by_slot", "_up_by_expert", "_attend", "_linear", "_norm_rotate_cached", "choose_experts"},
    "finetune": {"_join", "_lora_backward", "_update"},
    "generate quantised": {"_up", "_down", "_up_by_expert", "_attend"},
    "finetune quantised": {"_activate_backward", "_lora_backward"},
}


def test_the_passes_of_commands_need_no_numbers(tmp_path: Path) -> None:
    """A model with widths of whole tiles, as Hopper's kernels want them."""
    sizes = {
        "model_type": "qwen3_moe", "hidden_size": H, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 64,
        "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": K, "moe_intermediate_size": I,
        "intermediate_size": 512, "vocab_size": 1024, "norm_topk_prob": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    (tmp_path / "quantised").mkdir()
    sizes["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "quantised" / "config.json").write_text(json.dumps(sizes))
    found = program(tmp_path / "cache", "passes", str(tmp_path))
    for command, (names, left_out, layers) in found.items():
        assert not left_out, command
        assert layers == 1, "layers that are alike are gone through once"
        missing = EXPECTED[command] - set(names)
        assert not missing, (command, missing, set(names))


def test_all_that_was_found_is_compiled_and_then_marked_as_done(tmp_path: Path) -> None:
    """By one process at a time, so that most have to wait for it."""
    (tmp_path / "cache").mkdir()
    found, marked = program(tmp_path / "cache", "whole")
    assert found["kernels"] > 10 and not found["failed"] and not found["left_out"]
    assert marked


# From here on: the programs.


def layer(empty: Any, what: str) -> None:
    """Rows brought into order and added up; or a layer forward and backward."""
    from amoeba.backends.triton import BACKEND
    from amoeba.core.problem import Needs, Problem
    from amoeba.core.weights import ExpertWeights
    from amoeba.kernels import combine, sort

    slots, scale = empty(T, K, dtype=torch.int64), empty(T, K, dtype=torch.float32)
    bf16 = torch.bfloat16
    if what == "rows":
        sort.sort_rows(slots, E)
        rows = empty(T * K, H, dtype=bf16)
        for each in (rows, rows.flatten()[1 : 1 + T * H].view(T, H)):  # the second one is not aligned
            combine.combine(each, slots.to(torch.int32), scale, empty(T, H, dtype=bf16))
        return
    weights = ExpertWeights(empty(E, 2 * I, H, dtype=bf16), empty(E, H, I, dtype=bf16))
    problem = Problem(empty(T, H, dtype=bf16), slots, scale, weights)
    _, saved = BACKEND.forward(problem, "h")
    BACKEND.backward(problem, saved, empty(T, H, dtype=bf16), Needs(x=True, weight=True, gate_up=True, down=True))


def compile_ahead(what: str) -> list[str]:
    from amoeba.kernels.launch import ahead

    found: dict[Any, str] = {}
    gpu, workers = ahead.GPUS["sm_90"], ahead.Workers()

    def take(launch: ahead.Launch) -> None:
        found[launch.key] = launch.kernel.__name__
        workers.submit(launch)

    with ahead.standing_in(gpu), workers, ahead.noting(take):
        layer(lambda *shape, dtype: torch.empty(shape, dtype=dtype, device="cuda"), what)
    assert not workers.failed and workers.compiled == len(found)
    return list(found.values())


def launch(what: str, library: str) -> list[tuple[str, bool]]:
    """Of each kernel that was compiled or found: its name, and whether it was found."""
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    torch._C._cuda_getCurrentRawStream = lambda device: 0

    from triton import knobs

    from amoeba.backends import triton_rows
    from amoeba.kernels import tile_sizes
    from amoeba.kernels.hopper import gemm, wgrad

    tile_sizes.capability_of = lambda device: (9, 0)
    gemm.programs = wgrad.programs = lambda device: 132
    triton_rows.why_not_hopper = lambda problem: None
    found: list[tuple[str, bool]] = []
    knobs.compilation.listener = lambda **of: found.append((of["src"].fn.__name__, of["cache_hit"]))
    layer(lambda *shape, dtype: torch.zeros(shape, dtype=dtype), what)
    return found


def keys(order: str) -> dict[str, str]:
    """Of kernels that call the same functions, made in this order."""
    from amoeba.kernels import grouped_gemm, router, weight_only_gemm
    from amoeba.kernels.decode import by_expert, by_slot

    modules = grouped_gemm, router, weight_only_gemm, by_expert, by_slot
    found = {
        f"{module.__name__}.{name}": value.kernel
        for module in modules
        for name, value in vars(module).items()
        if hasattr(value, "bound")
    }
    names = sorted(found, reverse=order == "backward")
    made = {name: found[name].cache_key for name in names}
    return dict(sorted(made.items()))


def whole() -> tuple[dict[str, Any], bool]:
    """Of the preset tiny, with a look at the driver in place of the compiler."""
    from dataclasses import asdict

    from triton.runtime import driver

    from amoeba.jobs.compile_ahead import Work, mark_of
    from amoeba.jobs.warm import warm
    from amoeba.kernels.launch import ahead

    def look(launch: ahead.Launch) -> None:
        driver.active.get_current_target()

    work = Work("generate", "tiny", prompt_lengths=(16, 512))
    with mock.patch.object(ahead.Launch, "compile", look):
        found = warm(work, ahead.GPUS["sm_90"], cores=1)
    return asdict(found), mark_of(work).exists()


def passes(model: str) -> dict[str, tuple[list[str], list[str], int]]:
    return {command: passes_of(command, model) for command in EXPECTED}


def passes_of(command: str, model: str) -> tuple[list[str], list[str], int]:
    """The kernels that it launches, passes that failed, and how many layers it goes through."""
    from contextlib import ExitStack

    from amoeba.jobs import warm
    from amoeba.jobs.compile_ahead import Work
    from amoeba.kernels.launch import ahead

    names: list[str] = []
    left_out, models, make = [], [], warm._shape

    def shape(work: Work) -> Any:
        models.append(make(work))
        return models[0]

    command, _, more = command.partition(" ")
    rank = 16 if command == "finetune" else 0
    work = Work(command, str(Path(model, more)), 2, 128, prompt_lengths=(16,), balance="aux", rank=rank)
    noting = ahead.noting(lambda launch: names.append(launch.kernel.__name__))
    with mock.patch.object(warm, "_shape", shape), ahead.standing_in(ahead.GPUS["sm_90"]), noting, ExitStack() as stack:
        for name, run in warm.passes(work, stack):
            try:
                run()
            except Exception as error:
                left_out.append(f"{name}: {error!r}")
    return names, left_out, len(models[0].model.layers)


if __name__ == "__main__":
    programs = {"ahead": compile_ahead, "keys": keys, "launch": launch, "passes": passes, "whole": whole}
    print(json.dumps(programs[sys.argv[1]](*sys.argv[2:])))
