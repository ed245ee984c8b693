"""Every model type of the installed transformers that takes an experts implementation, with "amoeba" against "eager".

One loop, so that a type that transformers adds is tried without anybody listing it. A type that cannot be tried as a
whole text model, or not at all, must be listed here with its reason; one that breaks is not listed, and fails.
"""

import time

import pytest
import torch

from amoeba.integrations.experts_module import ATTRIBUTE
from tiny_models import build, build_experts, experts_classes, experts_inputs, experts_of, experts_parity, model_parity

# Classes whose text model cannot be run on token ids alone -> why.
EXPERTS_ALONE = {"Qwen3OmniMoeTalkerTextExperts": "the talker takes the thinker's embeddings, not token ids"}
# Classes that are not tried -> why. (None in transformers 5.8, 5.17 and 5.22.)
SKIPPED: dict[str, str] = {}
# In transformers 5.8; 5.17 has 54 and 5.22 has 62.
LEAST_WHOLE_MODELS = 35

CASES = [(model_type, name) for model_type, names in experts_classes().items() for name in names]


@pytest.mark.thorough  # one of each kind: test_transformers.py
@pytest.mark.filterwarnings("ignore")
def test_every_model_type_with_experts() -> None:
    whole: list[str] = []
    alone: list[str] = []
    failed: list[str] = []
    start = time.perf_counter()
    for model_type, experts_class in CASES:
        if experts_class in SKIPPED:
            continue
        try:
            line = _try(model_type, experts_class)
        except Exception as error:
            failed.append(f"{model_type} {experts_class}: {type(error).__name__}: {error}")
        else:
            (alone if experts_class in EXPERTS_ALONE else whole).append(line)
    skipped = [f"{name}: {reason}" for name, reason in SKIPPED.items()]
    print(f"{len(CASES)} experts classes in {time.perf_counter() - start:.0f} s")
    for title, lines in (("whole", whole), ("experts alone", alone), ("skipped", skipped), ("failed", failed)):
        print(f"{title}: {len(lines)}", *lines, sep="\n  ")
    assert not failed, "\n".join(failed)
    assert len(whole) >= LEAST_WHOLE_MODELS


@pytest.mark.thorough  # about the models of our tests, not about ours
@pytest.mark.filterwarnings("ignore")
def test_tiny_models_have_the_same_weights_every_time() -> None:
    changing = []
    for model_type, experts_class in CASES:
        if experts_class in EXPERTS_ALONE or experts_class in SKIPPED:
            continue
        torch.manual_seed(1)
        first = build(model_type, experts_class).state_dict()
        torch.manual_seed(2)
        second = build(model_type, experts_class).state_dict()
        changing += [f"{model_type}: {name}" for name in first if not torch.equal(first[name], second[name])]
    assert not changing, "\n".join(changing)


def _try(model_type: str, experts_class: str) -> str:
    if experts_class in EXPERTS_ALONE:
        modules = [build_experts(model_type, experts_class)]
        found = experts_parity(modules[0], experts_inputs(tokens=19, top_k=2))
        where = experts_class
    else:
        model = build(model_type, experts_class)
        found, where, modules = model_parity(model), type(model).__name__, experts_of(model)
    plans = [vars(module)[ATTRIBUTE] for module in modules if ATTRIBUTE in vars(module)]
    assert plans, f"{where} never called its experts through amoeba"
    assert found.holds, f"{where}: {found}"
    how = plans[0].fused or "its own functions"
    noisy = f", cancels to noise: {', '.join(found.noisy)}" if found.noisy else ""
    errors = f"output {found.output_error:.1e}, gradient {found.gradient_error:.1e} ({found.worst})"
    return f"{model_type} {where}: {errors}; {how}{noisy}"
