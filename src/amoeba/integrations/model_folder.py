"""Models, tokenizers and adapters from the folders in which Hugging Face's packages keep them.

name = check_model(folder)                             # ValueError that says what is missing in it
tokenizer, config = load_tokenizer_and_config(name)
model = load_model(name, dtype=None)                   # its experts computed by aMoEba
adapter = find_adapter("runs/mine")                    # the adapter's folder, here or in a run of `amoeba finetune`

Python code in a folder (auto_map) runs only with `trust_remote_code`, and weights are never unpickled.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from amoeba.core.errors import BadValue, bad_value, is_out_of_memory, one_line
from amoeba.core.log import logger
from amoeba.integrations.gguf_families import config_of, facts_of
from amoeba.integrations.gguf_files import is_gguf, need_gguf, read_header, tokenizer_of
from amoeba.integrations.text_model import auto_class, text_config

TRUST_FLAG = "--trust-remote-code"
ADAPTER_CONFIG = "adapter_config.json"  # as PEFT names it
UNFINISHED = "quantise.unfinished.json"  # in a folder that `amoeba quantise` has not finished
PACKING, STORE_INDEX = "packing.json", "index.json"  # of a store: while `amoeba pack` writes it, and when it is whole
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"),
    *("sentencepiece.bpe.model", "tekken.json"),
)
_PICKLES = ("pytorch_model*.bin", "model*.bin", "model*.pt", "consolidated*", "*.pth", "*.ckpt")
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")  # of experts, as families call it
_HUB_SECONDS = 5.0  # until the hub has to have answered its first request
MOST_QUOTED = 400  # characters of what another package says
ADAPTER_FOLDER, MODEL_FOLDER = "adapter", "model"  # in the folder of a run


def is_unfinished_store(folder: Path) -> bool:
    """A model may have a file of that name itself."""
    if (folder / STORE_INDEX).is_file():
        return False
    try:
        found = json.loads((folder / PACKING).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "fingerprint" in found


def check_model(name: str) -> str:
    path = Path(name).expanduser()
    if is_gguf(path):
        need_gguf(path)
        facts_of(read_header(path))
        return str(path)
    if not path.exists():
        if _HUB_NAME.fullmatch(name):
            return name
        remedy = "correct the path"
        raise bad_value("MODEL", "an existing folder, or owner/name of a model on the hub", repr(name), remedy)
    _check_no_file(path)
    trained = path / MODEL_FOLDER
    of_a_run = (trained / "config.json").is_file()
    remedy = f"give the run's model: {str(trained)!r}" if of_a_run else "give the folder that save_pretrained wrote"
    if (path / UNFINISHED).is_file():
        remedy = "run the command that started it again: it continues where it stopped"
        raise bad_value("MODEL", "a finished model", f"{name!r}, which amoeba quantise has not finished", remedy)
    if is_unfinished_store(path):
        remedy = "run the same amoeba pack command again: it continues where it stopped"
        raise bad_value("MODEL", "a finished store", f"{name!r}, which amoeba pack has not finished", remedy)
    if not (path / "config.json").is_file():
        raise bad_value("MODEL", "a folder with a config.json", f"{name!r}, which has none", remedy)
    check_json(path / "config.json")
    if not has_tokenizer(path):
        if not of_a_run:
            remedy = f"save the model's there: AutoTokenizer.from_pretrained(...).save_pretrained({name!r})"
        raise bad_value("MODEL", "a folder with a tokenizer (tokenizer.json)", f"{name!r}, which has none", remedy)
    return str(path)


def _check_no_file(path: Path) -> None:
    if path.is_file():
        remedy = "give the folder that contains it"
        raise bad_value("MODEL", "a folder or a GGUF file", f"the file {str(path)!r}", remedy)


def load_tokenizer_and_config(
    name: str, adapter: Path | None = None, *, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """The tokenizer is the adapter's where it has one: it may have a chat template that the model's has not."""
    config = load_config(name, trust_remote_code=trust_remote_code)
    of_tokenizer = name if adapter is None or not has_tokenizer(adapter) else str(adapter)
    return load_tokenizer(of_tokenizer, trust_remote_code=trust_remote_code), config


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    from transformers import AutoTokenizer

    with _reading(name, "tokenizer"):
        if is_gguf(name):
            return tokenizer_of(read_header(name))
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def load_config(name: str, *, trust_remote_code: bool = False) -> Any:
    from transformers import AutoConfig

    if not (from_file := is_gguf(name)):
        _check_no_file(Path(name).expanduser())
    with _reading(name, "config.json"):
        if from_file:
            config = config_of(read_header(name))
        else:
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        text = text_config(config)
    # more experts for a token than there are would end the first pass, in the words of torch's topk
    for chosen, all_of_them in (("num_experts_per_tok", _COUNTS), ("topk_group", ("n_group",))):
        count = getattr(text, chosen, None)
        of = next((each for each in all_of_them if isinstance(getattr(text, each, None), int)), None)
        if of is not None and isinstance(count, int) and not 1 <= count <= getattr(text, of):
            expected = f"a number from 1 to {getattr(text, of)}, its {of}"
            raise bad_value(f"{chosen} in config.json of {name!r}", expected, count, "correct the file")
    return config


def load_model(name: str, dtype: torch.dtype | None, *, trust_remote_code: bool = False) -> Any:
    from amoeba.integrations.transformers import register

    register()

    if Path(name).is_dir():
        has_weights(Path(name))
    config = load_config(name, trust_remote_code=trust_remote_code)
    with _reading(name, "model"), _one_after_another():
        loaded: Any = auto_class(config).from_pretrained(
            name,
            dtype=dtype or "auto",
            experts_implementation="amoeba",
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told in `found`; its own error tells none of them
        )
    model, found = loaded
    _check_weights_fit(name, found)
    return model.eval()


@contextmanager
def _one_after_another() -> Iterator[None]:
    """Has transformers read a tensor when its turn comes. Its threads would read all experts while the first ones are
    still being stacked, so that a model is in memory more than twice."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class UnreadTensor:
    def __init__(self, read: Callable[[], torch.Tensor], dtype: torch.dtype) -> None:
        self._read, self.dtype = read, dtype

    def __getitem__(self, place: Any) -> torch.Tensor:
        return self._read()[place]

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point


def load_rest(
    shape: Any, name: str, tensors: Mapping[str, torch.Tensor | UnreadTensor], dtype: torch.dtype | None = None
) -> Any:
    """A model without its experts. shape: the same model from `load_without_weights`, whose class and configuration it
    gets. tensors: all others of its checkpoint, which it takes over. dtype: None for the checkpoint's own."""
    from transformers import GenerationConfig

    from amoeba.integrations.experts_module import experts_left_out
    from amoeba.integrations.transformers import register

    register()

    with _reading(name, "model"), experts_left_out():
        model, found = type(shape).from_pretrained(
            None,
            config=shape.config,
            state_dict=tensors,
            dtype=dtype or "auto",
            experts_implementation="amoeba",
            trust_remote_code=False,  # its class is there already
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    _check_weights_fit(name, found)
    if (Path(name) / "generation_config.json").is_file():
        with _reading(name, "generation_config.json"):
            model.generation_config = GenerationConfig.from_pretrained(name, trust_remote_code=False)
    model.name_or_path = model.config.name_or_path = name
    return model.eval()


def _check_weights_fit(name: str, found: Any) -> None:
    """transformers would leave what is missing or of another size as it was drawn, at random."""
    for weight, there, expected in sorted(found["mismatched_keys"]):
        wanted = f"weights of the sizes that config.json gives: {tuple(expected)} of {weight}"
        remedy = "correct config.json, or copy or download the folder again"
        raise bad_value("MODEL", wanted, f"{tuple(there)} in {name!r}", remedy)
    missing = sorted(map(str, found["missing_keys"]))
    if missing:
        named = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        remedy = "copy or download it again"
        raise bad_value("MODEL", "weights for all of the model", f"none for {named} in {name!r}", remedy)


def load_without_weights(config: Any, name: str, *, trust_remote_code: bool = False) -> Any:
    with _reading(name, "model"), torch.device("meta"):
        return auto_class(config).from_config(config, trust_remote_code=trust_remote_code).eval()


def has_weights(folder: Path) -> bool:
    """Whether there are weights to load, all files of them whole. Pickles are refused: reading one may run code."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            remedy = "copy or download it again"
            raise bad_value(str(path), "a complete safetensors file", one_line(error), remedy) from error
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles and not files:
        got = f"{pickles[0]} in {str(folder)!r}, a pickle, which aMoEba does not read because it may run code"
        remedy = "convert it where you trust it: from_pretrained(...).save_pretrained(...) writes safetensors"
        raise bad_value("MODEL", "weights as model.safetensors", got, remedy)
    return bool(files)


def find_adapter(folder: str | Path) -> Path:
    path = Path(folder).expanduser()
    for candidate in (path, path / ADAPTER_FOLDER):
        if (candidate / ADAPTER_CONFIG).is_file():
            return candidate
    got = "a folder without one" if path.is_dir() else "no such folder"
    expected = f"a folder with {ADAPTER_CONFIG}, or a finished run of amoeba finetune"
    remedy = "check the path; a run that was interrupted has its adapter in checkpoints/"
    raise bad_value("--adapter", expected, f"{str(folder)!r}, {got}", remedy)


def has_tokenizer(folder: Path) -> bool:
    return any((folder / file).is_file() for file in _TOKENIZER_FILES)


def check_json(path: Path) -> None:
    """Where there is such a file, it holds a JSON object: transformers' own words for another do not name it."""
    if not path.is_file():
        return
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise bad_value(str(path), "a JSON object", f"invalid JSON ({one_line(error)})", "correct the file") from error
    if not isinstance(found, dict):
        raise bad_value(str(path), "a JSON object", f"a {type(found).__name__}", "correct the file")


@contextmanager
def _reading(name: str, part: str) -> Iterator[None]:
    """Files of others, read by packages of others: whatever comes out, what is in the folder is the reason."""
    if not Path(name).expanduser().exists():
        _offline_without_hub()
    try:
        yield
    except (ImportError, BadValue):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise _unreadable(name, part, error) from error


@functools.cache
def _offline_without_hub() -> None:
    """Without a network, huggingface_hub would repeat each request for half a minute. It takes what it has
    downloaded before if it knows that it is offline, so one request of a few seconds finds that out."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except Exception as error:  # of its HTTP package, which is another one in other versions
        logger.info("no answer from %s", constants.ENDPOINT, exc_info=error)
        constants.HF_HUB_OFFLINE = True


def _unreadable(name: str, part: str, error: Exception) -> ValueError:
    from huggingface_hub import constants

    if "trust_remote_code" in str(error):
        expected, got = f"a {part} that needs no Python code of its own", f"{name!r}, whose auto_map names some"
        return bad_value("MODEL", expected, got, f"add {TRUST_FLAG} to run that code, if you have read it and trust it")
    if "Unrecognized configuration class" in str(error):
        got = f"{name!r}, of another kind"
        remedy = "use it from Python: from_pretrained(..., experts_implementation='amoeba') of the model's own class"
        return bad_value("MODEL", "a language model that writes one token after another", got, remedy)
    # transformers' OSErrors say it in their first line and then talk of the hub
    said = str(error).strip().splitlines()[:1] if isinstance(error, OSError) else []
    words = " ".join(said or [f"{type(error).__name__}: {one_line(error)}"]).rstrip(" .:")
    here = "a folder" if Path(name).exists() else "no folder here"
    if here == "no folder here" and constants.HF_HUB_OFFLINE:
        got = f"{name!r}: no such folder here, not downloaded before, and no answer from {constants.ENDPOINT}"
        setting = " and unset HF_HUB_OFFLINE" if "HF_HUB_OFFLINE" in os.environ else ""
        remedy = f"correct the path, or connect to the network{setting}"
        return bad_value("MODEL", "a folder, or a hub name and a network", got, remedy)
    got = f"{name!r} ({here}): {words[:MOST_QUOTED]}"
    return bad_value("MODEL", f"a folder or a hub name whose {part} loads", got, "correct the name or the folder")
