"""FP8 and MXFP4 checkpoints run and train with their experts as the files have them."""

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Trainer, TrainingArguments
from transformers.integrations import finegrained_fp8

import amoeba
from amoeba import lora
from amoeba.integrations.experts_module import experts_modules, placed_in
from amoeba.integrations.precision import products_of
from amoeba.jobs.finetune.finetune import finetune
from amoeba.jobs.generate.generate import GenerationOptions, generate
from amoeba.jobs.settings import FinetuneSettings, load_settings
from amoeba.precision.quantised_experts import QuantisedExperts, dequantise_experts
from called import call
from quantised_checkpoints import write_fp8, write_mxfp4
from selection import quick
from tiny_models import build, logits_of, lora_gradients, save_byte_tokenizer, token_ids
from tiny_runs import Quiet

amoeba.register()
Made = tuple[Path, Any]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    """name -> folder and dequantised twin."""
    found = {}
    for name, write in {"fp8": write_fp8, "mxfp4": write_mxfp4}.items():
        folder = tmp_path_factory.mktemp(name)
        found[name] = folder, write(folder)
    return found


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation="amoeba", **{"dtype": torch.float32, **options}
    )


def of_experts(model: Any) -> list[QuantisedExperts]:
    found = [placed_in(module) for module in experts_modules(model).values()]
    assert found and all(isinstance(each, QuantisedExperts) for each in found)
    return found  # type: ignore[return-value]


def close(found: Tensor, expected: Tensor, most: float) -> bool:
    return bool((found.double() - expected.double()).norm() <= most * expected.double().norm())


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_logits_are_those_of_the_dequantised_model(name: str, checkpoints: dict[str, Made]) -> None:
    folder, twin = checkpoints[name]
    assert close(logits_of(load(folder)), logits_of(twin), 1e-5)


@pytest.mark.parametrize(("name", "most"), [("fp8", 1.02), ("mxfp4", 0.55)])
def test_experts_take_the_bytes_of_the_file(name: str, most: float, checkpoints: dict[str, Made]) -> None:
    """Also all that the model keeps for them: no dequantised copy is left anywhere."""
    model = load(checkpoints[name][0], dtype=torch.bfloat16)
    found = of_experts(model)
    biases = sum(b.nbytes for e in found for b in (e.stored_gate_up_bias, e.stored_down_bias) if b is not None)
    numbers = sum(e.num_experts * e.hidden * e.intermediate * 3 for e in found)
    assert sum(experts.nbytes for experts in found) - biases <= most * numbers
    kept = sum(p.nbytes for module in experts_modules(model).values() for p in module.parameters())
    assert kept == sum(experts.nbytes for experts in found)
    assert not any(p.requires_grad for module in experts_modules(model).values() for p in module.parameters())


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_lora_gradients_are_those_of_the_dequantised_model(name, checkpoints):
    """transformers drops gradients on the way through its quantised experts: those of the first layer would be 0."""
    folder, twin = checkpoints[name]

    model, twin = load(folder), copy.deepcopy(twin)
    targets = ["gate_proj", "up_proj", "down_proj", "q_proj", "v_proj"]
    for each in (model, twin):
        each.set_experts_implementation("amoeba")
    found, expected = (lora_gradients(each, token_ids(), targets=targets) for each in (model, twin))
    assert set(found) == set(expected)
    for each, gradient in expected.items():
        assert gradient.norm() > 0 and close(found[each], gradient, 1e-4), each


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_generate_writes_what_the_dequantised_model_writes(name, checkpoints, tmp_path):
    folder, twin = checkpoints[name]
    twin.save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path)
    texts = []
    for each in (folder, tmp_path):
        pieces: list[str] = []
        options = GenerationOptions(max_new_tokens=9, temperature=0, device=torch.device("cpu"), dtype=torch.float32)
        report = generate(each, "Once", options, pieces.append)
        texts.append("".join(pieces))
        assert (report.placement == f"{name}-weights") == (each == folder)
    assert texts[0] == texts[1]


def test_quantised_activations_are_used_where_they_are_faster(checkpoints, tmp_path):
    """By activation_scheme, and with blocks of 128 x 128 alone."""
    folder, _ = checkpoints["fp8"]
    assert {each.products for each in of_experts(load(folder))} == {"auto"}
    assert {each.products for each in of_experts(load(checkpoints["mxfp4"][0]))} == {"bf16"}
    shutil.copytree(folder, tmp_path / "static")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["activation_scheme"] = "static"
    (tmp_path / "static" / "config.json").write_text(json.dumps(config))
    assert {each.products for each in of_experts(load(tmp_path / "static"))} == {"bf16"}


def test_products_of_a_loaded_model_may_be_set(checkpoints: dict[str, Made]) -> None:
    model = load(checkpoints["fp8"][0])
    plain = logits_of(model)
    amoeba.set_precision(model, "w8a8")
    found = logits_of(model)
    assert 1e-3 < float((found - plain).norm() / plain.norm()) < 0.2
    told = products_of(model)
    assert told is not None and told.taken == "w8a8" and told.errors is not None
    assert 0.03 < told.errors["w8a8"] < 0.06 and told.errors["weight_only"] < 1e-5
    assert "in every pass, in plain torch, as it needs a Hopper GPU" in str(told)
    lora.attach(model, r=2)
    told = products_of(model)
    assert told is not None and (told.taken, told.reason) == ("float32", "w8a8 takes no LoRA factors")
    model = load(checkpoints["fp8"][0])
    amoeba.set_precision(model, "bf16")
    assert torch.equal(logits_of(model), plain)
    with pytest.raises(ValueError, match="one of bf16, w8a8, auto for quantised experts"):
        amoeba.set_precision(model, "fp8-ste")
    with pytest.raises(ValueError, match="these experts are in mxfp4"):
        amoeba.set_precision(load(checkpoints["mxfp4"][0]), "w8a8")


@pytest.mark.parametrize(
    ("asked", "taken", "said"),
    [
        ({}, "float32", "products in float32 (w8a8 needs a Hopper GPU"),
        ({"products": "bf16"}, "float32", "products in float32 (activations are not quantised)"),
        ({"experts": "w8a8"}, "w8a8", "products w8a8 in every pass"),
    ],
    ids=str,
)
def test_generate_tells_which_products_it_takes_and_their_errors(asked, taken, said, checkpoints):
    lines: list[str] = []
    common = {"max_new_tokens": 2, "temperature": 0, "device": torch.device("cpu"), "dtype": torch.float32}
    report = generate(checkpoints["fp8"][0], "Once", GenerationOptions(**common, **asked), str, say=lines.append)
    assert report.products is not None and report.products.taken == taken and said in lines[0]
    assert (report.products.errors is not None) == ("error of a layer" in lines[0]) == (taken == "w8a8")
    assert report.backend == ("eager" if taken == "w8a8" else report.backend)


@quick(lambda name: name == "mxfp4")
@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_fine_tuning_learns_as_the_dequantised_model_does(name, checkpoints, tmp_path):
    folder, twin = checkpoints[name]
    twin.save_pretrained(tmp_path / "twin")
    save_byte_tokenizer(tmp_path / "twin")
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"{word} and", "completion": f" {word}"} for word in ("one", "two", "three", "four") * 3]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reports = []
    for each in (folder, tmp_path / "twin"):
        told = {
            "model": str(each), "data": str(data), "out": str(tmp_path / f"run-{len(reports)}"), "steps": 4,
            "batch_size": 2, "held_out": 0.2, "sequence_length": 32, "r": 2, "learning_rate": 1e-2, "eval_every": 4,
            "targets": ["experts", "q_proj"], "dtype": "float32",
        }  # fmt: skip
        reports.append(finetune(load_settings(None, told, FinetuneSettings), Quiet()))
    assert reports[0].experts == f"{name}-weights"
    assert abs(reports[0].final_loss - reports[1].final_loss) <= 1e-4 * reports[1].final_loss
    assert reports[0].final_loss < reports[0].start_loss


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_a_dtype_may_be_a_word_as_in_transformers(dtype: Any, checkpoints: dict[str, Made]) -> None:
    model = load(checkpoints["fp8"][0], dtype=dtype)
    assert {model.dtype, *(each.dtype for each in of_experts(model))} == {torch.bfloat16}


def test_scales_in_ue8m0(tmp_path: Path) -> None:
    twin = write_fp8(tmp_path, scale_dtype="float8_e8m0fnu")
    assert close(logits_of(load(tmp_path)), logits_of(twin), 1e-5)


def test_sizes_that_are_no_whole_blocks_keep_gate_and_up_apart(checkpoints: dict[str, Made]) -> None:
    folder, twin = checkpoints["fp8"]  # I = 136: a block of up begins where none of gate_up would
    (first, *_) = of_experts(load(folder))
    assert (first.intermediate % 128, first.parts) == (8, 2)
    dense = dequantise_experts(first)
    module = next(iter(experts_modules(twin).values()))
    assert torch.equal(dense.gate_up_EJH, module.gate_up_proj) and torch.equal(dense.down_EHI, module.down_proj)


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_plain_trainer_trains_adapters_next_to_them(name: str, checkpoints: dict[str, Made], tmp_path: Path) -> None:
    folder, _ = checkpoints[name]
    model = load(folder)
    lora.attach(model, r=2)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    rows = [{"input_ids": ids, "labels": ids} for ids in token_ids()] * 2
    arguments = TrainingArguments(
        tmp_path, max_steps=2, per_device_train_batch_size=2, save_strategy="no", report_to=[], learning_rate=1e-2,
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=rows).train()
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before and "lora_b" in n)


def test_the_model_may_be_cast_moved_and_copied(checkpoints: dict[str, Made]) -> None:
    folder, twin = checkpoints["fp8"]
    model = copy.deepcopy(load(folder).to(torch.bfloat16).to(torch.float32))
    assert close(logits_of(model), logits_of(twin), 2e-2)
    expected = dequantise_experts(of_experts(load(folder))[0].to(torch.float32)).down_EHI
    assert torch.equal(dequantise_experts(of_experts(model)[0]).down_EHI, expected)


def test_placing_them_elsewhere_is_refused_and_auto_leaves_them(checkpoints: dict[str, Made], tmp_path: Path) -> None:
    model = load(checkpoints["fp8"][0])
    assert amoeba.place_experts(model, "auto") == ("fp8-weights", "as stored in the checkpoint", ())
    with pytest.raises(ValueError, match=r"experts as ordinary tensors; got model.layers.0.mlp.experts, quantised to"):
        amoeba.place_experts(model, "mxfp4-weights")
    with pytest.raises(ValueError, match="experts as ordinary tensors"):
        model.save_pretrained(tmp_path)
    before = logits_of(model)
    with pytest.raises(ValueError, match=r"experts as ordinary tensors; .* Keep experts_implementation=\"amoeba\""):
        model.set_experts_implementation("eager")  # which would compute with nothing, and say nothing
    model.set_experts_implementation({"": "amoeba"})  # as transformers does for each part of a model
    assert torch.equal(logits_of(model), before)


def spoil(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


ATTENTION = "model.layers.0.self_attn.q_proj.weight"


def each_of(ending: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda t: t.update({name: make(t[name]) for name in t if name.endswith(ending)})


SPOILT: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "no scales of one": (
        lambda t: t.pop("model.layers.0.mlp.experts.1.up_proj.weight_scale_inv"),
        "experts.1.up_proj.weight in fp8-128; got a tensor without scales",
    ),
    "one missing": (
        lambda t: [t.pop(f"model.layers.0.mlp.experts.1.up_proj.weight{end}") for end in ("", "_scale_inv")],
        "as many equal matrices for each part",
    ),
    "scales of another size": (
        lambda t: t.update({"model.layers.0.mlp.experts.1.up_proj.weight_scale_inv": torch.ones(7, 7)}),
        r"experts.1.up_proj.weight in fp8-128: 136 columns and scales of shape \(2, 2\); got .* shape \(7, 7\)",
    ),
    "one scale of a matrix": (
        each_of("_scale_inv", torch.max),
        r"k_proj.weight in fp8-128: 136 columns and scales of shape \(1, 2\); got .* scales of shape \(\)",
    ),
    "attention without scales": (
        lambda t: t.pop(f"{ATTENTION}_scale_inv"),
        f"{ATTENTION} with its scales, {ATTENTION}_scale_inv; got the numbers alone .float8_e4m3fn",
    ),
    "scales by a name of others": (
        lambda t: [t.update({n.replace("_scale_inv", "_scale"): t.pop(n)}) for n in list(t) if "_scale_inv" in n],
        "experts.0.down_proj.weight with its scales, .*; got the numbers alone",
    ),
    "another kind of codes": (
        each_of("proj.weight", lambda codes: codes.float().to(torch.float8_e5m2)),
        "proj.weight in one of float8_e4m3fn, uint8; got float8_e5m2",
    ),
    "another kind of scales": (
        each_of("_scale_inv", lambda scales: scales.to(torch.float8_e4m3fn)),
        "scales of .* in one of float32, .*; got float8_e4m3fn",
    ),
    "an expert fewer in every part": (
        lambda t: [t.pop(name) for name in list(t) if "experts.5." in name],
        r"gate_up_proj of shape \(6, 272, 136\), as config.json says; got \(5, 272, 136\)",
    ),
    "an expert more in every part": (
        lambda t: t.update({n.replace("experts.5.", "experts.6."): t[n].clone() for n in list(t) if "experts.5." in n}),
        r"gate_up_proj of shape \(6, 272, 136\), as config.json says; got \(7, 272, 136\)",
    ),
}


@pytest.mark.parametrize("how", SPOILT)
def test_what_is_missing_is_named(how: str, checkpoints: dict[str, Made], tmp_path: Path) -> None:
    change, message = SPOILT[how]
    folder = shutil.copytree(checkpoints["fp8"][0], tmp_path / "model")
    spoil(folder, change)
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.0.mlp.experts.down_proj_scales"), "a tensor .*down_proj_scales; got none"),
        (each_of("_scales", torch.Tensor.bfloat16), "in one of uint8, float8_e8m0fnu.*; got .*bfloat16"),
    ],
)  # fmt: skip
def test_scales_of_mxfp4_are_there_and_are_exponents(change, message, checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints["mxfp4"][0], tmp_path / "model")
    spoil(folder, change)
    with pytest.raises(ValueError, match=message):
        load(folder)
    with pytest.raises(ValueError, match=message):
        amoeba.stream.attach(str(folder), ram="64MiB")


def test_files_next_to_those_of_the_checkpoint_are_not_read(checkpoints: dict[str, Made], tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints["fp8"][0], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    others = {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if "norm" in name}
    save_file(others, folder / "older.safetensors", {"format": "pt"})
    expected = logits_of(load(checkpoints["fp8"][0]))
    assert torch.equal(logits_of(load(folder)), expected)
    (folder / "model.safetensors").rename(folder / "first.safetensors")
    index = {"weight_map": {name: "first.safetensors" for name in tensors if not name.endswith("_scale_inv")}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits_of(load(folder)), expected)
    with amoeba.stream.attach(str(folder), ram="64MiB", dtype=torch.float32) as streamed:
        assert torch.equal(logits_of(streamed.model), expected)
    (folder / "first.safetensors").unlink()
    with pytest.raises(ValueError, match=r"a file first.safetensors, as model.safetensors.index.json says; got none"):
        load(folder)


QUANTISED_BY_OTHERS = {
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "by modelopt .W4A8., which transformers does not"),
    "compressed-tensors": ({"quant_method": "compressed-tensors"}, "by compressed-tensors: F8_E4M3 for .*gate_up_proj"),
    "int4": (
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {"weights":
            {"type": "int", "num_bits": 4}}}}, "by compressed-tensors .pack-quantized.: F8_E4M3 for .*gate_up_proj"
    ),
    "awq": ({"quant_method": "awq"}, "by awq: no such tensor for .*gate_up_proj"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "by bitsandbytes: U8 for .*gate_up_proj"),
    "torchao": (
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig"}}},
        "by torchao .*: F8_E4M3 for .*gate_up_proj",
    ),
    "nobody": (None, "quantization_config in config.json for weights in FP8; got none"),
    "words": ({"quant_method": "fp8", "weight_block_size": "128x128"}, "two numbers, such as .*; got '128x128'"),
}  # fmt: skip


@pytest.mark.parametrize("method", QUANTISED_BY_OTHERS)
def test_what_others_have_quantised_is_refused_by_name(method, checkpoints, tmp_path):
    """Codes without their scales would be taken for numbers: transformers itself skips what it does not know."""
    facts, message = QUANTISED_BY_OTHERS[method]
    folder = shutil.copytree(checkpoints["fp8"][0], tmp_path / "model")

    def as_they_do(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("proj.weight")]:
            codes, scales = tensors.pop(name), tensors.pop(f"{name}_scale_inv")
            tensors[f"{name}_scale"] = scales
            if method == "awq":
                tensors[name.replace("weight", "qweight")] = codes.view(torch.int32)
            else:
                tensors[name] = codes.view(torch.uint8) if method == "bitsandbytes" else codes

    spoil(folder, as_they_do)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": facts}))
    with pytest.raises(ValueError, match=message):
        load(folder)
    done = call("generate", folder, "Once", code=2)
    assert re.search(message, " ".join(done.stderr.split()))
    assert "whose model loads" not in done.stderr  # said once, in our own words
    assert re.search(message, call("plan", folder, "--machine", "4090", code=2).said), (
        "no plan for what no command loads"
    )


def test_one_scale_for_a_matrix_is_dequantised_by_transformers(tmp_path: Path) -> None:
    twin = write_fp8(tmp_path, hidden_size=64, moe_intermediate_size=64)  # one block

    def flat(tensors: dict[str, Tensor]) -> None:
        tensors |= {name: t.amax() for name, t in tensors.items() if name.endswith("_scale_inv") and t.numel() == 1}

    spoil(tmp_path, flat)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["weight_block_size"] = None
    path.write_text(json.dumps(config))
    try:
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    except RuntimeError as error:
        pytest.skip(f"transformers {transformers.__version__} cannot load it itself: {error}")
    model = load(tmp_path)
    assert all(placed_in(module) is None for module in experts_modules(model).values())
    assert close(logits_of(model), logits_of(twin), 1e-5)


def test_blocks_that_are_no_powers_of_two_are_refused_by_name(tmp_path: Path) -> None:
    write_fp8(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["weight_block_size"] = [96, 128]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="block of scales: expected powers of two, such as 128 x 128; got 96 x 128"):
        load(tmp_path)


def test_other_implementations_and_dequantising_are_transformers_own_affair(checkpoints: dict[str, Made]) -> None:
    folder, _ = checkpoints["fp8"]
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager", dtype=torch.float32)
    assert all(placed_in(module) is None for module in model.modules())
    config = FineGrainedFP8Config(dequantize=True, weight_block_size=(128, 128))
    model = load(folder, quantization_config=config)
    assert all(placed_in(module) is None for module in model.modules())


def test_fp8_experts_of_transformers_are_computed_too() -> None:
    """A model that its quantizer made, switched to amoeba afterwards."""
    model = build("qwen3_moe")
    model.set_experts_implementation("eager")
    config = FineGrainedFP8Config(weight_block_size=(8, 8))
    finegrained_fp8.replace_with_fp8_linear(model, quantization_config=config, pre_quantized=True)
    model.set_experts_implementation("amoeba")
    module = next(module for module in model.modules() if isinstance(module, finegrained_fp8.FP8Experts)).to_empty(
        device="cpu"
    )
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        drawn = torch.rand(parameter.shape, generator=generator) + 0.1
        parameter.data.copy_((drawn / 16) if name.endswith("scale_inv") else (drawn - 0.6).to(parameter.dtype))
    x = torch.randn(5, module.hidden_dim, generator=generator, requires_grad=True)
    ids = torch.tensor([[0, 1], [2, 3], [1, 0], [4, 5], [5, 2]])
    weights = torch.rand(5, 2, generator=generator)
    y = module(x, ids, weights)
    y.sum().backward()

    def dense(name: str) -> Tensor:
        scales = getattr(module, f"{name}_scale_inv").float().repeat_interleave(8, 1).repeat_interleave(8, 2)
        weight = getattr(module, name).float()
        return (weight * scales[:, : weight.shape[1], : weight.shape[2]]).detach()

    up, down = dense("gate_up_proj"), dense("down_proj")
    expected = torch.zeros(5, module.hidden_dim)
    for t in range(5):
        for k in range(2):
            gate, linear = (up[ids[t, k]] @ x[t]).chunk(2)
            expected[t] += weights[t, k] * (down[ids[t, k]] @ (torch.nn.functional.silu(gate) * linear))
    assert close(y, expected, 1e-5)
    assert x.grad is not None and x.grad.norm() > 0
