"""Images in prompts and conversations, through the processor of the model's folder.

    reader = ImageReader(name, config, tokenizer)
    given = reader.read(text, ["cat.png"])       # input_ids, pixel_values, ...: what the model's forward takes

text: by the chat template, which has a placeholder for each image.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amoeba.core.errors import bad_value, one_line
from amoeba.integrations.model_folder import MOST_QUOTED
from amoeba.integrations.text_model import auto_class


class ImageReader:
    def __init__(self, name: str, config: Any, tokenizer: Any, *, trust_remote_code: bool = False) -> None:
        """tokenizer: gets the processor's chat template where it has none."""
        known = auto_class(config)._model_mapping.get(type(config), None)
        if known is not None and "pixel_values" not in inspect.signature(known.forward).parameters:
            got = f"{name!r}, a {known.__name__}"
            raise bad_value("images", "a model that reads images", got, "leave the images out, or use another model")
        try:
            from PIL import Image
        except ImportError as error:
            raise bad_value("images", "the package Pillow", "none", "run `pip install pillow`") from error
        self._open = Image.open
        self._processor = _processor(name, config, trust_remote_code)
        self._processor.tokenizer = tokenizer
        tokenizer.chat_template = tokenizer.chat_template or self._processor.chat_template
        if not tokenizer.chat_template:
            remedy = "copy chat_template.jinja from the original model, or use the family's chat model"
            raise bad_value("images", "a model with a chat template", f"{name!r}, which has none", remedy)

    def read(self, text: str, images: Sequence[str | bytes]) -> dict[str, Tensor]:
        opened = [self._image(image) for image in images]
        try:
            found = self._processor(text=[text], images=opened, return_tensors="pt", add_special_tokens=False)
        except Exception as error:  # the processor's own, of a template without placeholders for one
            words = f"{type(error).__name__}: {one_line(error)}"[:MOST_QUOTED]
            raise bad_value("images", "images that the model's processor accepts", words, "use others") from error
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    @staticmethod
    def ids(given: dict[str, Tensor]) -> list[int]:
        return given["input_ids"][0].tolist()

    def _image(self, image: str | bytes) -> Any:
        try:
            with self._open(io.BytesIO(image) if isinstance(image, bytes) else image) as opened:
                return opened.convert("RGB")
        except Exception as error:  # Pillow has one of its own for too many pixels, and others for broken files
            shown = f"{len(image)} bytes" if isinstance(image, bytes) else repr(image)
            is_address = isinstance(image, str) and image.startswith(("http:", "https:"))
            remedy = "download it first" if is_address else "correct the path, or save a smaller copy as PNG or JPEG"
            raise bad_value("image", "an image that Pillow reads", f"{shown}: {one_line(error)}", remedy) from error


def _processor(name: str, config: Any, trust_remote_code: bool) -> Any:
    from transformers import AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    try:
        try:
            found = AutoProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
        except ImportError:  # torchvision, which its reader of videos needs
            if type(config) not in PROCESSOR_MAPPING:
                raise
            known = _without_videos(PROCESSOR_MAPPING[type(config)])
            found = known.from_pretrained(name, trust_remote_code=trust_remote_code)
    except ImportError as error:
        remedy = "install torchvision in the version for your PyTorch"
        raise bad_value("images", "the packages that the model's processor needs", one_line(error), remedy) from error
    except Exception as error:
        words = f"{type(error).__name__}: {one_line(error)}"[:MOST_QUOTED]
        remedy = "copy preprocessor_config.json and its other files from the original model"
        raise bad_value("images", f"a processor in {name!r}", words, remedy) from error
    if not hasattr(found, "image_processor"):
        remedy = "copy preprocessor_config.json and its other files from the original model"
        raise bad_value("images", f"a processor for images in {name!r}", type(found).__name__, remedy)
    return found


def _without_videos(processor: Any) -> Any:
    class WithoutVideos(processor):
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [each for each in processor.get_attributes() if each != "video_processor"]

    WithoutVideos.__name__ = processor.__name__
    return WithoutVideos


def is_of_tokens(name: str) -> bool:
    """Whether such an input has a number for each token; others have the images' numbers."""
    return name.endswith("token_type_ids")


def joined(rows: Sequence[dict[str, Tensor]], length: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """What rows have besides their ids, as one batch: numbers of tokens padded with 0, images end to end in this dtype.
    Rows without images have nothing."""
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        there = [row[name] for row in rows if name in row]
        if is_of_tokens(name):
            numbers = [row.get(name, there[0][:0]) for row in rows]
            found[name] = torch.stack([torch.nn.functional.pad(each, (0, length - len(each))) for each in numbers])
        else:
            whole = torch.cat(there)
            found[name] = whole.to(dtype) if whole.is_floating_point() else whole
    return found
