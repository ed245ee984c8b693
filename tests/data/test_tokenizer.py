"""The tokenizer that `amoeba train` makes: repeatable, lossless, and the checkpoint's own where there is one."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from amoeba.data.corpus import Corpus
from amoeba.data.documents import Conversation, Message, Text, render
from amoeba.data.tokenizer import (
    END_OF_TEXT,
    SMALLEST_VOCABULARY,
    check_understands,
    load_or_train_tokenizer,
    train_tokenizer,
)

TEXTS = [
    f"line {number}: the quick brown fox {number * number}\n    naïve café, 漢字 {number % 7}" for number in range(199)
]
CORPUS = Corpus(train=[Text(text) for text in TEXTS], held_out=[Text("zyzzyva " * 99)], description="")
TOKENIZER = train_tokenizer(TEXTS, 400)


@given(st.binary().map(lambda raw: raw.decode("utf-16-le", errors="ignore")))  # st.text() reads all of Unicode
def test_decoding_what_was_encoded_gives_the_text_back(text):
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


@pytest.mark.parametrize(
    "text", ["", " ", "  a  ,  b .", "\r\n\t", "\0", "e\u0301 \ufeff", "👩‍👩‍👧", f"a {END_OF_TEXT} b", "don 't ."]
)
def test_awkward_texts_come_back(text):
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


@pytest.mark.parametrize("parallel", ["true", "false"])
def test_the_vocabulary_depends_on_neither_text_order_nor_threads(monkeypatch, parallel):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
    for seed in range(5):
        shuffled = random.Random(seed).sample(TEXTS, len(TEXTS))
        again = train_tokenizer(iter(shuffled), 400)
        assert again.get_vocab() == TOKENIZER.get_vocab()
        assert again.backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()


def test_the_asked_size_is_reached_and_shortens_the_text():
    assert len(TOKENIZER) == 400
    bytes_only = train_tokenizer(TEXTS, SMALLEST_VOCABULARY)
    assert len(bytes_only) == 257
    assert len(bytes_only(TEXTS[0])["input_ids"]) == len(TEXTS[0].encode())
    assert len(TOKENIZER(TEXTS[0])["input_ids"]) < len(TEXTS[0].encode()) / 2
    assert len(train_tokenizer([], 4096)) == 257


def test_the_end_of_text_is_one_token_for_end_begin_and_padding():
    (token,) = TOKENIZER(END_OF_TEXT)["input_ids"]
    assert token == TOKENIZER.eos_token_id == TOKENIZER.bos_token_id == TOKENIZER.pad_token_id
    assert TOKENIZER("a")["input_ids"] == TOKENIZER("a", add_special_tokens=False)["input_ids"]


def test_a_vocabulary_without_room_for_the_bytes_is_explained():
    with pytest.raises(ValueError, match=r"vocab_size: expected at least 257 .*; got 256\. 4096 suits"):
        train_tokenizer(TEXTS, 256)


def test_only_the_train_split_is_learned_from():
    found = load_or_train_tokenizer(None, CORPUS, 400)
    assert found.get_vocab() == TOKENIZER.get_vocab()


def test_a_checkpoint_brings_its_own_tokenizer(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    found = load_or_train_tokenizer(str(tmp_path), Corpus([], [], ""), 7)
    assert found.get_vocab() == TOKENIZER.get_vocab()
    assert found.eos_token == END_OF_TEXT
    assert found.decode(found(" a , 漢\n")["input_ids"]) == " a , 漢\n"


@pytest.mark.parametrize("name", [".", "missing"])
def test_a_folder_without_a_tokenizer_is_explained(tmp_path, name):
    folder = str(tmp_path / name)
    with pytest.raises(ValueError) as caught:
        load_or_train_tokenizer(folder, CORPUS, 400)
    wanted = (
        rf"{re.escape(folder)}: expected a checkpoint with a tokenizer; got none .+\. Check the name, .*tokenizer.json"
    )
    assert re.match(wanted, str(caught.value)), caught.value


def test_a_checkpoint_without_end_of_text_is_explained(tmp_path):
    tokenizer = train_tokenizer([], 257)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"end-of-text token.*; got one without eos_token\. Set eos_token"):
        load_or_train_tokenizer(str(tmp_path), CORPUS, 400)


@pytest.mark.parametrize(("model_type", "vocabulary", "asked", "size"), [
    ("qwen3_moe", 380, 380, 380), ("olmoe", 380, 4096, 380), ("mixtral", 2000, 400, 400),
])  # fmt: skip
def test_a_folder_with_a_config_alone_gets_a_tokenizer_trained_on_the_data(
    model_type, vocabulary, asked, size, tmp_path
):
    """transformers makes an empty one for qwen3_moe and olmoe, which turns 354 kB into 3 rows."""
    AutoConfig.for_model(model_type, vocab_size=vocabulary).save_pretrained(tmp_path)
    found = load_or_train_tokenizer(str(tmp_path), CORPUS, asked)
    assert len(found) == size
    assert found.decode(found(TEXTS[7])["input_ids"]) == TEXTS[7]
    assert max(found.get_vocab().values()) < vocabulary


def test_a_vocabulary_without_room_for_a_tokenizer_names_the_config(tmp_path):
    AutoConfig.for_model("qwen3_moe", vocab_size=200).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"vocab_size: expected at least 257 .* got 200\. Raise it in config.json"):
        load_or_train_tokenizer(str(tmp_path), CORPUS, 400)


def empty_tokenizer():
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="<end>")


def latin_tokenizer():
    letters = {letter: number for number, letter in enumerate(["<unk>", *"abcdefghijklmnopqrstuvwxyz "])}
    tokenizer = Tokenizer(models.BPE(letters, [], unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>")


@pytest.mark.parametrize(("make", "text"), [(empty_tokenizer, "plain words"), (latin_tokenizer, "細胞 γράμματα буквы")])
def test_a_tokenizer_that_loses_most_of_the_text_is_refused(make, text, tmp_path):
    make().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer: expected one that understands the text; got .* 100% are lost"):
        load_or_train_tokenizer(str(tmp_path), Corpus([Text(text)] * 9, [], ""), 400)


def test_a_tokenizer_that_changes_case_and_spaces_is_not_refused():
    check_understands(latin_tokenizer(), [Text("plain words é")])
    tokenizer = latin_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    check_understands(tokenizer, [Text("PLAIN  WORDS\n\n")])


def test_messages_are_rendered_by_the_chat_template():
    tokenizer = train_tokenizer([], 257)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    assert render(Conversation((Message("user", "a"), Message("assistant", "b"))), tokenizer) == "<user>a<assistant>b"
    with pytest.raises(
        ValueError, match=r"messages: expected .*template accepts; got the roles system, user: no system"
    ):
        render(Conversation((Message("system", "a"), Message("user", "b"))), tokenizer)
