"""Images in prompts and in rows to fine-tune on: the numbers of transformers, through every command."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from amoeba import lora
from amoeba.data.documents import parse_document, render
from amoeba.integrations.images import ImageReader
from amoeba.integrations.model_folder import load_model, load_tokenizer_and_config
from amoeba.jobs.convert.merge import merge
from amoeba.jobs.finetune.finetune import finetune
from amoeba.jobs.settings import FinetuneSettings
from called import call
from selection import quick
from tiny_runs import Quiet

PIL = pytest.importorskip("PIL", reason="images need Pillow")
vision = pytest.importorskip("tiny_vision")
KINDS = ["qwen3_5_moe", "glm4v_moe"]
QUESTION, ANSWER = "What is it?", "a cat"
GREEDY = ("--temperature", 0, "--dtype", "float32", "--json")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not all(hasattr(transformers, each[1]) for each in vision.PROCESSORS.values()),
        reason=f"transformers {transformers.__version__} has no image processors that need Pillow alone",
    ),
]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {request.param}")
    root = tmp_path_factory.mktemp(request.param)
    vision.save_image(root / "cat.png")
    vision.save_image(root / "dog.png", seed=1, size=(32, 16))
    folder = vision.save_vision(request.param, root / "model")
    try:
        transformers.AutoImageProcessor.from_pretrained(folder)
    except ImportError:
        pytest.skip(f"transformers {transformers.__version__} reads images with torchvision, which is not installed")
    return folder


def of_transformers(folder: Path) -> Any:
    auto = transformers.AutoModelForImageTextToText
    return auto.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()


def inputs_of(folder: Path, image: Path, before: str, after: str) -> dict[str, Tensor]:
    """Without the processor's class: its image processor, and one placeholder for each of the image's tokens."""
    read = transformers.AutoImageProcessor.from_pretrained(folder)
    pixels = dict(read(PIL.Image.open(image), return_tensors="pt"))
    count = int(pixels["image_grid_thw"].prod()) // read.merge_size**2
    text = before + vision.BEGIN + vision.IMAGE * count + vision.END + after
    ids = vision.vision_tokenizer()(text, return_tensors="pt")["input_ids"]
    kinds = (ids == vision.vision_tokenizer().convert_tokens_to_ids(vision.IMAGE)).long()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds, **pixels}


def test_one_image_gives_the_tokens_of_transformers(folder: Path) -> None:
    image = folder.parent / "cat.png"
    given = inputs_of(folder, image, "user:", f"{QUESTION}\nassistant:")
    expected = of_transformers(folder).generate(**given, max_new_tokens=8, do_sample=False)[
        0, given["input_ids"].shape[1] :
    ]
    options = ("--max-new-tokens", 8, "--device", "cpu", *GREEDY)
    document = call("generate", folder, QUESTION, "--image", image, *options).document
    assert document["generated_ids"] == expected.tolist()
    assert document["prompt_tokens"] == given["input_ids"].shape[1]
    another = call("generate", folder, QUESTION, "--image", folder.parent / "dog.png", *options).document
    assert another["generated_ids"] != document["generated_ids"]


def test_a_setting_of_native_steps_that_images_do_not_have_is_reported(folder: Path) -> None:
    words = ("generate", folder, QUESTION, "--max-new-tokens", 2, "--device", "cpu", "--dense", "int8", *GREEDY)
    assert "--dense int8 changes nothing: transformers reads" in call(*words, "--image", folder.parent / "cat.png").said


def row(image: str, answer: str = ANSWER) -> dict[str, Any]:
    question = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def settings_for(folder: Path, out: Path, **changes: Any) -> FinetuneSettings:
    told: dict[str, Any] = {
        "model": str(folder),
        "data": str(folder.parent / "train.jsonl"),
        "held_out": str(folder.parent / "held_out.jsonl"),
        "out": str(out),
        "steps": 1,
        "batch_size": 2,
        "sequence_length": 96,
        "r": 2,
        "targets": ["experts"],
        "learning_rate": 1e-2,
        "log_every": 1,
        "dtype": "float32",
    }
    return FinetuneSettings(**told | changes)


def write_rows(folder: Path) -> None:
    text = {"messages": [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "no image"}]}
    rows = {"train": [row("cat.png"), text], "held_out": [row("dog.png")]}
    for name, each in rows.items():
        (folder.parent / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in each))


def loss_of(model: Any, given: dict[str, Tensor], answer: str) -> tuple[float, int]:
    """Summed over the answer, and its tokens."""
    labels = given["input_ids"].clone()
    count = len(answer) + 1  # a token per byte, and the one that ends it
    labels[:, :-count] = -100
    with torch.no_grad():
        return model(**given, labels=labels).loss.item() * count, count


@quick(lambda folder: folder == KINDS[0])
def test_a_step_on_rows_with_and_without_images_has_the_loss_of_transformers(folder: Path, tmp_path: Path) -> None:
    write_rows(folder)
    console = Quiet()
    report = finetune(settings_for(folder, tmp_path / "run"), console)
    model, tokenizer = of_transformers(folder), vision.vision_tokenizer()
    end = tokenizer.eos_token
    given = inputs_of(folder, folder.parent / "cat.png", "user:", f"{QUESTION}\nassistant:{ANSWER}{end}")
    ids = tokenizer(f"user:So?\nassistant:no image{end}", return_tensors="pt")["input_ids"]
    sums = [loss_of(model, given, ANSWER), loss_of(model, {"input_ids": ids}, "no image")]
    expected = sum(loss for loss, _ in sums) / sum(count for _, count in sums)
    first = next(line["loss"] for line in console.lines if "loss" in line)
    assert first == pytest.approx(expected, rel=1e-4)
    given = inputs_of(folder, folder.parent / "dog.png", "user:", f"{QUESTION}\nassistant:{ANSWER}{end}")
    loss, count = loss_of(model, given, ANSWER)
    assert report.start_loss == pytest.approx(loss / count, rel=1e-4)


@quick(lambda folder: folder == KINDS[0])
def test_stores_and_quantised_folders_read_images(folder: Path, tmp_path: Path) -> None:
    call("pack", folder, "--out", tmp_path / "store")
    call("quantise", folder, "--format", "mxfp8", "--out", tmp_path / "codes")
    assert about_the_cat(folder, tmp_path / "store", "--ram", "1GiB") == about_the_cat(
        folder, folder, "--device", "cpu"
    )
    assert len(about_the_cat(folder, tmp_path / "codes")) == 5


def about_the_cat(folder: Path, model: Path, *more: object) -> list[int]:
    words = model, QUESTION, "--image", folder.parent / "cat.png", "--max-new-tokens", 5, *GREEDY, *more
    return call("generate", *words).document["generated_ids"]


@pytest.mark.thorough  # logits of a merged one: tests/integrations/test_composite_models.py
def test_merged_folders_read_images(folder: Path, tmp_path: Path) -> None:
    write_rows(folder)
    finetune(settings_for(folder, tmp_path / "run", steps=2), Quiet())
    merge(folder, tmp_path / "run", tmp_path / "merged")
    adapted = about_the_cat(folder, folder, "--adapter", tmp_path / "run", "--device", "cpu")
    assert about_the_cat(folder, tmp_path / "merged", "--device", "cpu") == adapted


def test_an_adapter_of_the_text_part_alone_fits_the_whole_model(tmp_path: Path) -> None:
    whole = load_model(str(vision.save_vision("qwen3_5_moe", tmp_path / "model")), None)
    text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", experts_implementation="amoeba")
    assert type(text) is not type(whole)
    lora.attach(text, 2, 4, ["experts", "q_proj"])
    for parameter in text.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(0))
    lora.save(text, tmp_path / "adapter")
    lora.load(whole, tmp_path / "adapter")
    ids = torch.tensor([[3, 9, 27, 80]])
    with torch.no_grad():
        found, expected = (each(input_ids=ids, use_cache=False).logits for each in (whole, text))
    assert torch.allclose(found, expected, atol=1e-5)


# --- rows


PIXEL = b"\x89PNG"


def test_images_are_parts_or_a_list_of_the_record(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PIXEL)
    answer = {"role": "assistant", "content": "yes"}
    inline = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(PIXEL).decode()}}
    bare, text = {"type": "image"}, {"type": "text", "text": "so?"}
    records = {
        "part": {"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}, text]}, answer]},
        "listed": {"messages": [{"role": "user", "content": [bare, text]}, answer], "images": ["a.png"]},
        "before": {"messages": [{"role": "user", "content": "so?"}, answer], "images": [{"bytes": PIXEL}]},
        "inline": {"messages": [{"role": "user", "content": [inline, text]}, answer]},
    }
    for name, record in records.items():
        found = parse_document(record, "a.jsonl, line 1", tmp_path)
        assert found.messages[0].content == "\ufffcso?", name
        assert found.images == ((PIXEL,) if name in ("before", "inline") else (str(tmp_path / "a.png"),)), name
    with pytest.raises(ValueError, match="Use amoeba finetune"):
        render(found, None)


@pytest.mark.parametrize(
    ("content", "images", "expected"),
    [
        ([{"type": "image", "path": "b.png"}], None, "line 1: expected an image"),
        ([{"type": "image"}, {"type": "image"}], ["a.png"], "expected 2 `images`"),
        ([{"type": "video", "path": "a.mp4"}], None, "got 'video' of user"),
        ([{"type": "image", "url": "https://x.org/a.png"}], None, "Download it"),
    ],
)
def test_what_is_no_image_is_named(content: Any, images: Any, expected: str, tmp_path: Path) -> None:
    record = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]}
    with pytest.raises(ValueError, match=expected):
        parse_document(record | ({"images": images} if images else {}), "a.jsonl, line 1", tmp_path)


@quick(lambda folder: folder == KINDS[0])
def test_refusals_say_what_is_missing(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny_models import build

    tokenizer, config = load_tokenizer_and_config(str(folder))
    reader = ImageReader(str(folder), config, tokenizer)
    (tmp_path / "text.png").write_text("no pixels")
    with pytest.raises(ValueError, match="an image that Pillow reads"):
        reader.read(vision.IMAGE, [str(tmp_path / "text.png")])
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 1000)
    PIL.Image.new("1", (50, 50)).save(tmp_path / "huge.png")
    with pytest.raises(ValueError, match=r"an image that Pillow reads; got .*exceeds limit.*a smaller copy"):
        reader.read(vision.IMAGE, [str(tmp_path / "huge.png")])
    with pytest.raises(ValueError, match="Download it first"):
        reader.read(vision.IMAGE, [str(Path("https://example.com/cat.png"))])
    with pytest.raises(ValueError, match="images that the model's processor accepts"):
        reader.read("no placeholder", [str(folder.parent / "cat.png")])
    with pytest.raises(ValueError, match="a model that reads images"):
        ImageReader("mine", build("qwen3_moe").config, tokenizer)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(ValueError, match="Copy preprocessor_config"):
        ImageReader(str(tmp_path), config, tokenizer)
