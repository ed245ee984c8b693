"""Said aloud: experts that transformers computes itself, and a balance that nothing in the model answers to."""

import re
import typing
import warnings
from pathlib import Path

import pytest
import transformers
from torch import nn

from amoeba import lora, stream
from amoeba.data.corpus import load_corpus
from amoeba.data.tokenizer import load_or_train_tokenizer
from amoeba.integrations.coverage import coverage
from amoeba.integrations.place_experts import place_experts
from amoeba.jobs.convert.quantise import quantise_folder
from amoeba.jobs.finetune.finetune import finetune
from amoeba.jobs.generate.loaded_model import _warm_up
from amoeba.jobs.settings import FinetuneSettings, TrainSettings
from amoeba.jobs.train.run_folder import Console
from amoeba.jobs.train.train import train
from amoeba.observe.router_watch import RouterWatch, check_balance
from amoeba.stream.store.packing import pack
from amoeba.tuning.model_shapes import shapes_of
from tiny_models import build, experts_classes, experts_of, modeling_module, save_byte_tokenizer, tiny_config, token_ids

_TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
_T5 = {"d_model": 32, "d_ff": 48, "num_heads": 4, "vocab_size": 64, "num_experts": 4}
# Types with experts but without transformers' decorator, in one version of it or another
# -> (class of the model, config, class of the experts).
NOT_HANDED_OVER = {
    "llama4": (
        "Llama4ForCausalLM",
        {**_TINY, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4},
        "Llama4TextExperts",
    ),
    "dbrx": (
        "DbrxForCausalLM",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "vocab_size": 64,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        },
        "DbrxExperts",
    ),
    "doge": ("DogeForCausalLM", {**_TINY, "is_moe": True, "num_experts": 16, "num_experts_per_tok": 4}, "DogeCDMoE"),
    "jetmoe": (
        "JetMoeForCausalLM",
        {**_TINY, "num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 4},
        "JetMoeParallelExperts",
    ),
    "longcat_flash": (
        "LongcatFlashForCausalLM",
        {
            **_TINY,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 24,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
        },
        "LongcatFlashExperts",
    ),
    "aria": (
        "AriaTextForCausalLM",
        {**_TINY, "num_key_value_heads": 2, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
        "AriaExperts",
    ),
    "granitemoe": ("GraniteMoeForCausalLM", None, "GraniteMoeParallelExperts"),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", None, "GraniteMoeHybridParallelExperts"),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM", None, "GraniteMoeSharedParallelExperts"),
    "step3p7": ("Step3p7TextModel", None, "Step3p7Experts"),
    "switch_transformers": ("SwitchTransformersForConditionalGeneration", _T5, "SwitchTransformersExperts"),
    "nllb_moe": (
        "NllbMoeForConditionalGeneration",
        {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 64, "num_experts": 4}
        | {"encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
        "NllbMoeExperts",
    ),
}
# Not for text: one expert for each dataset of poses.
NOT_LANGUAGE = {"vitpose_backbone"}


def model_of(model_type, changes=None, **options):
    class_name, config, _ = NOT_HANDED_OVER[model_type]
    model_class = getattr(modeling_module(model_type), class_name)
    config_class = typing.get_type_hints(model_class.__init__).get("config", model_class.config_class)
    made = tiny_config(config_class, model_type) if config is None else config_class(**(config | (changes or {})))
    return model_class._from_config(made, **options)


MODELS = Path(transformers.__file__).parent / "models"
HANDS_OVER = "use_experts_impl"  # in the modeling file of a type that does


def installed(model_type):
    return (MODELS / model_type).is_dir()


def hands_over(model_type):
    return any(HANDS_OVER in path.read_text() for path in (MODELS / model_type).glob("modeling_*.py"))


@pytest.mark.filterwarnings("ignore")
def test_the_list_above_is_whole():
    """Every modeling file with a class of experts either has transformers' decorator or is listed."""
    named = re.compile(r"^class \w*(?:Experts|MoE|Moe)\((?:nn|torch\.nn)\.", re.MULTILINE)
    sources = {path.parent.name: path.read_text() for path in MODELS.glob("*/modeling_*.py")}
    found = {name for name, source in sources.items() if named.search(source) and HANDS_OVER not in source}
    assert found - NOT_LANGUAGE <= set(NOT_HANDED_OVER)


@pytest.mark.parametrize("model_type", NOT_HANDED_OVER)
def test_a_model_that_hands_nothing_over_says_so(model_type):
    if not installed(model_type):
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    if hands_over(model_type):
        pytest.skip(f"transformers {transformers.__version__} hands the experts of {model_type} over")
    expected = NOT_HANDED_OVER[model_type][2]
    with pytest.warns(UserWarning, match=rf'experts_implementation="amoeba": experts by {expected} of transformers'):
        model = model_of(model_type, experts_implementation="amoeba")
    found = coverage(model)
    assert not found.ours and set(found.others.values()) == {expected}
    with pytest.warns(UserWarning, match=expected):
        model.set_experts_implementation("amoeba")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.set_experts_implementation("eager")
    with pytest.raises(ValueError, match=rf"experts are computed by {expected} of transformers"):
        lora.attach(model, 4, 8, ["experts"])
    assert not RouterWatch(model).names
    assert place_experts(model, "auto").reason == "there are no experts to place"
    with pytest.raises(ValueError, match=rf"experts are computed by {expected} of transformers"):
        place_experts(model, "mxfp4-weights")


@pytest.mark.filterwarnings("ignore")
def test_models_that_hand_over_all_their_experts_say_nothing():
    for model_type, classes in list(experts_classes().items())[::6]:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*experts_implementation=.amoeba.*")
            model = build(model_type, classes[0], experts_implementation="amoeba")
        found = coverage(model)
        assert len(found.ours) == len(experts_of(model)) and not found.others and str(found) == "amoeba", model_type


class Quiet(Console):
    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)

    def step(self, line, steps):
        pass


def settings(folder, model, **changes):
    text = folder / "text.txt"
    text.write_text("the cat sat on the mat and looked at the dog. " * 60)
    small = {"steps": 2, "batch_size": 2, "sequence_length": 16, "vocab_size": 300, "save_every": 100}
    return TrainSettings(model=model, data=str(text), out=str(folder / "run"), **{**small, **changes})


@pytest.mark.filterwarnings("ignore")
def test_amoeba_generate_says_who_computes_the_experts_of_llama4():
    backend, reason = _warm_up(model_of("llama4", experts_implementation="amoeba").eval(), 3)
    assert backend is None
    assert reason.startswith("Llama4ForCausalLM has its experts computed by Llama4TextExperts of transformers")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind",
    ["llama4", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("doge", "jetmoe", "longcat_flash"))],
)
def test_every_command_refuses_experts_that_transformers_does_not_hand_over(kind, tmp_path):
    folder, model = tmp_path / kind, model_of(kind, {"vocab_size": 300})
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f'{{"prompt": "{number}", "completion": "and {number}"}}\n' for number in range(9)))
    tuned = FinetuneSettings(model=str(folder), data=str(data), out=str(tmp_path / "run"), steps=1)
    commands = {
        "pack": lambda: pack(folder, tmp_path / "store"),
        "stream": lambda: stream.attach(folder, ram="1GiB"),
        "quantise": lambda: quantise_folder(folder, tmp_path / "quantised", "fp8"),
        "finetune": lambda: finetune(tuned, Quiet()),
        "attach": lambda: lora.attach(model, 4, 8, ["experts"]),
        "tune": lambda: shapes_of(str(folder), 64),
        "place": lambda: place_experts(model, "mxfp4-weights"),
    }
    reasons = set()
    for name, command in commands.items():
        with pytest.raises(ValueError, match=f"got {model.config.model_type}, whose experts are") as refused:
            command()
        assert "nothing to stream" not in str(refused.value), name
        reasons.add(str(refused.value).partition("got ")[2].partition(". ")[0])
    assert reasons == {f"{model.config.model_type}, whose experts are computed by {coverage(model)}"}


@pytest.mark.filterwarnings("ignore")
def test_amoeba_train_refuses_llama4_and_names_its_experts(tmp_path):
    folder = tmp_path / "llama4"
    folder.mkdir()
    model_of("llama4", {"vocab_size": 300}).config.save_pretrained(folder)
    asked = settings(tmp_path, str(folder))
    load_or_train_tokenizer(None, load_corpus(asked.data), 300).save_pretrained(folder)
    with pytest.raises(ValueError, match=r"--model: .* llama4_text, whose experts are computed by Llama4TextExperts"):
        train(asked, Quiet())


def test_amoeba_train_refuses_a_bias_balance_where_no_router_has_a_bias(tmp_path):
    with pytest.raises(ValueError, match=r"balance: expected aux or none.*no selection bias.*Use --balance aux"):
        train(settings(tmp_path, "mixtral", balance="bias"), Quiet())
    assert not (tmp_path / "run" / "config.json").exists()  # so that the folder is free for the next try


@pytest.mark.filterwarnings("ignore")
def test_a_balance_loss_that_no_router_answers_to_is_refused():
    if not installed("zaya"):
        pytest.skip(f"transformers {transformers.__version__} has no zaya")
    model = build("zaya").train()
    watch = RouterWatch(model)
    watch.balance(0.01, 0.0)
    model(input_ids=token_ids(), use_cache=False).logits.sum().backward()
    with pytest.raises(ValueError, match=r"balance: expected routers next to the experts"):
        watch.check_balanced()


def test_a_bias_balance_is_taken_where_routers_have_one():
    model = build("deepseek_v3")
    check_balance(model, "bias", 0.0)
    check_balance(model, "aux", 0.001)


def test_experts_that_all_tokens_share_are_nobodys_to_hand_over():
    class SomeSharedExperts(nn.Linear):
        pass

    class SomeExperts(nn.Linear):
        pass

    model = nn.ModuleDict({"shared_experts": SomeSharedExperts(2, 2), "experts": SomeExperts(2, 2)})
    assert coverage(model) == ((), {"experts": "SomeExperts"})
