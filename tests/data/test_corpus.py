"""What load_corpus reads, how it splits, and what it says about what it cannot read."""

import builtins
import gzip
import json
import os
import re
import sys
import threading
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from amoeba.data import corpus as data
from amoeba.data import sources
from amoeba.data.corpus import load_corpus
from amoeba.data.documents import Completion, Conversation, Message, Text, characters, render

CHAT = Conversation((Message("user", "Hello?"), Message("assistant", "Hello.")))
PAGE = "\n\n".join(f"Paragraph {number}: " + "words and more words " * 20 for number in range(199))


def assert_explained(source, *wanted, error=ValueError, **options):
    with pytest.raises(error) as caught:
        load_corpus(None if source is None else str(source), **options)
    message = str(caught.value)
    assert re.fullmatch(r".+: expected .+; got .+\. [A-Z0-9`].+\.", message, re.DOTALL), message
    for part in wanted:
        assert part in message


def documents(source):
    corpus = load_corpus(str(source))
    return corpus.train + corpus.held_out


def written(folder, name, content):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def lines(*records):
    return "\n".join(json.dumps(record) for record in records)


@pytest.fixture
def without(monkeypatch):
    def hide(package):
        real = builtins.__import__

        def refuse(name, *args, **kwargs):
            if name.split(".")[0] == package:
                raise ImportError(name)
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", refuse)

    return hide


# --- the built-in text


@pytest.fixture(scope="module")
def reference():
    return load_corpus(None)


def test_the_language_reference_is_there_without_a_download(reference):
    assert 300_000 < characters(reference.train) < 1_000_000
    share = characters(reference.held_out) / characters(reference.train + reference.held_out)
    assert 0.04 < share <= 0.05
    assert "Python 3." in reference.description and f"{len(reference.train)} documents" in reference.description


def test_no_passage_of_the_held_out_reference_is_trained_on(reference):
    def passages(documents):
        found = (" ".join(passage.split()) for document in documents for passage in document.text.split("\n\n"))
        return {passage for passage in found if len(passage) >= sources.PASSAGE_CHARACTERS}

    assert len(passages(reference.held_out)) > 20
    assert not passages(reference.held_out) & passages(reference.train)


def test_the_same_call_gives_the_same_corpus_and_another_seed_another_split(reference):
    assert load_corpus(None) == reference
    other = load_corpus(None, seed=1)
    assert other.held_out != reference.held_out
    assert set(other.train + other.held_out) == set(reference.train + reference.held_out)


def test_a_python_without_the_reference_is_explained(without):
    without("pydoc_data")
    assert_explained(None, "pydoc_data", "Name a file")


# --- the split


@given(
    st.lists(st.text("ab \n\u00e9\u6f22", min_size=1, max_size=7).filter(str.strip), min_size=2, max_size=17),
    st.floats(0.001, 0.999),
    st.integers(),
)
def test_a_split_keeps_every_document_and_shares_none(texts, held_out, seed):
    both = list(map(Text, texts))
    if len(set(both)) == 1:
        return
    train, held = data._split(both, held_out, seed, "texts")
    assert train and held
    assert sorted(d.text for d in train + held) == sorted(texts)
    assert not set(train) & set(held)
    assert train == [document for document in both if document in set(train)]


def test_the_split_does_not_depend_on_the_order_of_the_documents():
    many = [Text(f"document {number}") for number in range(199)]
    assert set(data._split(many, 0.1, 0, "")[1]) == set(data._split(many[::-1], 0.1, 0, "")[1])


def test_one_long_row_among_a_thousand_short_ones_leaves_rows_to_train_on(tmp_path):
    rows = [{"text": "long " * 20_000}, *({"text": f"short {number}"} for number in range(1000))]
    corpus = load_corpus(str(written(tmp_path, "a.jsonl", lines(*rows))))
    assert 40 <= len(corpus.held_out) <= 51
    assert len(corpus.train) + len(corpus.held_out) == 1001
    assert f"{len(corpus.train)} documents to train on" in corpus.description
    assert f"{len(corpus.held_out)} held out" in corpus.description
    assert "% instead of 5.0% because document lengths vary widely" in corpus.description


@given(
    st.lists(st.tuples(st.sampled_from([1, 7, 60, 5000]), st.integers(1, 3)), min_size=20, max_size=60),
    st.sampled_from([0.05, 0.1, 0.3]),
    st.integers(0, 9),
)
def test_neither_most_documents_nor_most_characters_are_held_out(shapes, held_out, seed):
    """Whatever their lengths and however many copies: at most the share, or one content where none fits."""
    both = [Text(f"{number} " + "x" * length) for number, (length, copies) in enumerate(shapes)
            for _ in range(copies)]  # fmt: skip
    train, held = data._split(both, held_out, seed, "texts")
    if len(set(held)) > 1:
        assert len(held) <= held_out * len(both) + 1
        assert characters(held) <= held_out * characters(both)
    assert not set(train) & set(held)


def test_about_the_asked_share_of_characters_is_held_out(tmp_path):
    path = written(tmp_path, "page.txt", PAGE)
    for share in (0.05, 0.3, 0.9):
        corpus = load_corpus(str(path), held_out=share)
        assert characters(corpus.held_out) / len(PAGE) == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize(
    ("text", "head", "tail"),
    [
        ("one\n\ntwo\n\nthree\n", "one\n\ntwo", "three"),
        ("one\ntwo\nthree", "one\ntwo", "three"),
        ("one two three", "one two", "three"),
        ("ab", "a", "b"),
    ],
)
def test_one_document_alone_is_cut_at_a_paragraph_or_a_line(tmp_path, text, head, tail):
    corpus = load_corpus(str(written(tmp_path, "one.txt", text)), held_out=0.3)
    assert (corpus.train, corpus.held_out) == ([Text(head)], [Text(tail)])


@settings(max_examples=30)
@given(
    st.text("ab \n\t\x1c\u00a0\u2029\u00e9\u6f22", min_size=2).filter(lambda text: len(text.strip()) >= 2),
    st.floats(0.001, 0.999),
)
@example("one text", 1e-17)
@example("one text", 1 - 1e-16)
def test_both_halves_of_one_document_have_text(text, held_out):
    head, tail = data._cut_in_two(Text(text), held_out, "text")
    assert head.text.strip() and tail.text.strip()
    assert "".join((head.text + tail.text).split()) == "".join(text.split())


def test_copies_of_one_document_are_cut_as_one(tmp_path):
    corpus = load_corpus(str(written(tmp_path, "a.jsonl", lines(*[{"text": "one\ntwo"}] * 3))))
    assert not set(corpus.train) & set(corpus.held_out)


@pytest.mark.parametrize(
    ("record", "kind"), [({"messages": [{"role": "user", "content": "x"}]}, "conversation"), ({"text": "x"}, "text")]
)
def test_one_document_that_cannot_be_cut_is_explained(tmp_path, record, kind):
    path = written(tmp_path, "a.jsonl", lines(record))
    assert_explained(path, "two different documents", f"a single {kind}", "Add documents")


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, float("nan")])
def test_a_share_that_leaves_a_side_empty_is_explained(share):
    assert_explained(None, "held_out: expected a fraction between 0 and 1", str(share), held_out=share)


# --- text files


@given(st.text(alphabet="ab \n", max_size=760).map(lambda text: text * 20))
def test_cutting_a_text_into_blocks_loses_only_blanks_at_the_cuts(text):
    blocks = [block.text for block in sources.blocks(text)]
    assert all(len(block) <= sources.BLOCK_CHARACTERS for block in blocks)
    assert "".join("".join(blocks).split()) == "".join(text.split())


def test_a_long_text_is_cut_between_paragraphs(tmp_path):
    found = documents(written(tmp_path, "page.md", PAGE))
    assert len(found) > 10
    assert all(document.text.startswith("Paragraph ") for document in found)


def test_text_keeps_its_indentation_and_loses_the_marks_of_windows(tmp_path):
    path = written(tmp_path, "a.py", b"\xef\xbb\xbf    if x:\r\n        y\r\nz")
    assert list(sources.read_file(path)) == [sources.Placed(Text("    if x:\n        y\nz"), str(path))]


def test_text_that_is_not_utf8_names_the_file_and_the_offset(tmp_path):
    path = written(tmp_path, "latin.txt", b"caf\xe9 au lait")
    assert_explained(path, "latin.txt", "UTF-8", "0xe9 at offset 3", "iconv")


@pytest.mark.parametrize("name", ["a.txt", "a.json", "a.jsonl"])
@pytest.mark.parametrize("content", ["", " \n\n"])
def test_an_empty_file_is_explained(tmp_path, name, content):
    assert_explained(written(tmp_path, name, content), name, "text to train on", "got ")


# --- JSON


@pytest.mark.parametrize("name", ["rows.csv", "rows.TSV"])
def test_a_table_is_not_taken_for_text(tmp_path, name):
    file = tmp_path / name
    file.write_text("question,answer\nHow are you?,Well\n")
    assert_explained(file, "commas included", "JSON lines")


def test_json_lines_hold_text_messages_and_completions(tmp_path):
    messages = [{"role": role, "content": content} for role, content in CHAT.messages]
    records = [
        {"text": "a\u2028b", "source": "ignored"},
        {"messages": messages, "text": None},
        {"prompt": "1+1=", "completion": "2"},
        {"prompt": messages[:1], "completion": messages[1:]},
    ]
    path = written(tmp_path, "a.jsonl", "\n\n".join(json.dumps(r, ensure_ascii=False) for r in records) + "\n")
    expected = [Text("a\u2028b"), CHAT, Completion("1+1=", "2"), Conversation(CHAT.messages, given=1)]
    assert sorted(documents(path), key=str) == sorted(expected, key=str)
    as_list = written(tmp_path, "a.json", json.dumps(records))
    assert load_corpus(str(as_list)).train == load_corpus(str(path)).train


@pytest.mark.parametrize("name", ["pipe", "chat", "chat.jsonl.1", "chat.json"])
def test_records_are_read_as_records_whatever_the_file_is_called(tmp_path, name):
    """Not as a text that has their braces in it."""
    content, path = lines({"prompt": "a", "completion": "b"}, {"text": "c"}), tmp_path / name
    if name == "pipe":
        os.mkfifo(path)
        threading.Thread(target=path.write_text, args=(content,)).start()
    else:
        path.write_text(content)
    assert sorted(documents(path), key=str) == [Completion("a", "b"), Text("c")]


@pytest.mark.parametrize(
    ("name", "first"), [("a.txt", '{"text": "b"}'), ("a.log", '{"level": 1}'), ("a", "{% text %}")]
)
def test_text_stays_text_where_a_line_of_it_is_no_record(tmp_path, name, first):
    assert [found.text for found in documents(written(tmp_path, name, f"{first}\nand"))] == [first, "and"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "folder", "a.txt.gz"])
def test_a_compressed_file_is_read_as_what_is_in_it(tmp_path, name):
    records, path = lines({"text": "a"}, {"text": "b"}), tmp_path / name
    if name == "folder":
        path.mkdir()
        (path / "archive.tar.gz").write_bytes(gzip.compress(b"\0"))  # left out
    file = path / "b.jsonl.gz" if name == "folder" else path
    file.write_bytes(gzip.compress(b"a\n\nb" if name == "a.txt.gz" else records.encode()))
    assert sorted(found.text for found in documents(path)) == ["a", "b"]
    file.write_bytes(file.read_bytes()[:-4])
    assert_explained(path, "expected a whole gzip file")


def test_one_json_object_is_one_document(tmp_path):
    assert documents(written(tmp_path, "a.json", '{"text": "one\\ntwo"}')) == [Text("one"), Text("two")]


def test_blank_records_are_counted(tmp_path):
    path = written(tmp_path, "a.jsonl", lines({"text": "a"}, {"text": " "}, {"text": ""}, {"text": "b"}))
    corpus = load_corpus(str(path))
    assert len(corpus.train + corpus.held_out) == 2
    assert corpus.description.endswith("; skipped: 2 blank documents")


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ('{"text": "a"', ["valid JSON", "Expecting ',' delimiter, column 13"]),
        ("[" * 100_000, ["valid JSON", "recursion"]),
        ('["a"]', ["an object with `text`", "got ['a']"]),
        ('{"title": "a", "body": null}', ["`prompt` and `completion`", "the fields title, body (null)"]),
        ("{}", ["the fields (none)"]),
        ('{"prompt": "a"}', ["the fields prompt"]),
        ('{"text": 7}', ["`text` to be a string", "got 7"]),
        ('{"text": "a\\ud800"}', ["valid Unicode", "\\ud800, at character 1"]),
        ('{"prompt": "a", "completion": ["b"]}', ["`completion` to be a string"]),
        ('{"messages": []}', ["`messages` to be a list", "got []"]),
        ('{"messages": "hello"}', ["`messages` to be a list", "got 'hello'"]),
        ('{"messages": ["hello"]}', ["message 1 of `messages`", "got 'hello'"]),
        ('{"messages": [{"role": "user"}]}', ["`messages[0].content` to be a string", "got null"]),
        ('{"messages": [{"role": "a", "content": "", "tool_calls": [1]}]}', ["without tool calls"]),
        ('{"text": ' + "9" * 5000 + "}", ["valid JSON", "..."]),
    ],
    ids=range(15),
)
def test_a_bad_line_names_the_file_the_line_and_the_fault(tmp_path, line, wanted):
    path = written(tmp_path, "a.jsonl", f'{{"text": "good"}}\n\n{line}\n')
    assert_explained(path, "a.jsonl, line 3: expected", *wanted)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ('[{"text": "a"}, {"title": "b"}]', ["a.json, entry 2", "the fields title"]),
        ('[\n{"text": }]', ["valid JSON", "line 2, column 10"]),
        ("3", ["a list of objects or one object", "got 3"]),
    ],
)
def test_a_bad_json_file_is_explained(tmp_path, content, wanted):
    assert_explained(written(tmp_path, "a.json", content), *wanted)


# --- parquet, folders, names


def fake_parquet(monkeypatch, rows):
    """pyarrow's reading of these rows, in batches of two, as far as it is used."""

    class ParquetFile:
        schema_arrow = SimpleNamespace(names=list(rows[0]))

        def __init__(self, path):
            if path.read_bytes() != b"PAR1":
                raise ValueError("magic bytes not found")

        def iter_batches(self, columns):
            chosen = [{column: row[column] for column in columns} for row in rows]
            for start in range(0, len(rows), 2):
                yield SimpleNamespace(to_pylist=lambda start=start: chosen[start : start + 2])

    parquet = SimpleNamespace(ParquetFile=ParquetFile)
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(parquet=parquet))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)


def test_parquet_rows_are_documents(tmp_path, monkeypatch):
    fake_parquet(monkeypatch, [{"id": n, "text": f"row {n}"} for n in range(5)])
    path = written(tmp_path, "a.parquet", "PAR1")
    assert set(documents(path)) == {Text(f"row {n}") for n in range(5)}
    assert_explained(written(tmp_path, "b.parquet", "PAR2"), "a parquet file", "magic bytes", "Write it again")


def test_a_null_in_parquet_names_its_row(tmp_path, monkeypatch):
    fake_parquet(monkeypatch, [{"text": "a"}, {"text": "b"}, {"text": None}])
    assert_explained(written(tmp_path, "a.parquet", "PAR1"), "a.parquet, row 3", "text (null)")


@pytest.mark.parametrize("columns", [["id", "body"], ["prompt", "id"]])
def test_parquet_without_the_columns_is_explained(tmp_path, monkeypatch, columns):
    fake_parquet(monkeypatch, [dict.fromkeys(columns, "x")])
    path = written(tmp_path, "a.parquet", "PAR1")
    assert_explained(path, "the columns `text`, or", f"got the columns {', '.join(columns)}", "Rename a column")


def test_parquet_without_pyarrow_is_explained(tmp_path, without):
    without("pyarrow")
    assert_explained(written(tmp_path, "a.parquet", "PAR1"), "the package pyarrow", "pip install pyarrow")


def test_parquet_by_the_real_pyarrow(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": [{"role": "user", "content": f"row {n}"}], "id": n} for n in range(5)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert len(documents(tmp_path / "a.parquet")) == 5
    assert_explained(written(tmp_path, "b.parquet", "no"), "a parquet file", "Write it again")


def test_a_folder_is_read_in_order_with_what_is_left_out_counted(tmp_path):
    for name, content in {
        "b.txt": "second",
        "a/z.JSONL": lines({"text": "first"}),
        "c.py": "third = 3",
        "d.bin": b"\0\1",
        "e.txt": "",
        ".git/config": "hidden",
    }.items():
        written(tmp_path, name, content)
    left_out = data.Counter()
    assert [found.document for found in sources.read_source(str(tmp_path), left_out)] == [
        Text("first"),
        Text("second"),
        Text("third = 3"),
        Text(""),
    ]
    description = load_corpus(str(tmp_path)).description
    for part in ("1 hidden file", "1 binary file", "1 blank document"):
        assert f"skipped: {part}" in description


def test_what_a_record_says_that_nothing_reads_is_counted(tmp_path):
    question = {"role": "user", "content": "Hello?", "thinking": None}
    answer = {"role": "assistant", "content": "Yes."}
    path = written(
        tmp_path,
        "chat.jsonl",
        lines(
            {"messages": [question, answer | {"thinking": "Hm.", "weight": 0}], "tools": [{"name": "f"}]},
            {"messages": [question, answer | {"thinking": "Oh."}], "tools": [], "text": None},
            {"text": "a text", "messages": [question, answer]},
            {"prompt": "Hello?", "completion": "Yes.", "source": "elsewhere"},
        ),
    )
    found = load_corpus(str(path)).description.partition("; skipped: ")[2].split("; skipped: ")
    assert sorted(found) == ["1 `messages` field", "1 `tools` field", "1 `weight` field", "2 `thinking` fields"]


def test_a_bad_file_in_a_folder_is_not_skipped(tmp_path):
    written(tmp_path, "a.txt", "good")
    written(tmp_path, "deep/b.txt", b"\xff")
    assert_explained(tmp_path, "b.txt", "offset 0")


def test_a_folder_without_readable_files_is_explained(tmp_path):
    assert_explained(tmp_path, "a folder with text", "an empty folder")
    written(tmp_path, "a.bin", b"\0")
    written(tmp_path, ".b.txt", "x")
    assert_explained(tmp_path, "a folder with text", "1 hidden file, 1 binary file")


@pytest.mark.parametrize("name", ["/nowhere/corpus", "./corpus", "~/no/such", "corpus.jsonl", "texts/corpus.TXT"])
def test_a_missing_path_is_not_looked_up_as_a_dataset(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace())
    assert_explained(name, f"{name}: expected an existing file", "no such path", error=FileNotFoundError)


def test_an_empty_name_is_explained():
    assert_explained("", "data: expected a file", "got ''")


def test_a_name_without_datasets_installed_is_explained(without):
    without("datasets")
    wanted = ("no such path", "datasets", "is not installed", "pip install datasets")
    assert_explained("wikitext", *wanted, error=FileNotFoundError)


def test_a_name_is_loaded_with_datasets(monkeypatch):
    def load_dataset(name, configuration, split):
        assert (name, configuration, split) in [("owner/name", None, "train"), ("owner/name", "small", "train")]
        return [{"text": f"row {n}", "configuration": configuration} for n in range(3)]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert set(documents("owner/name")) == {Text(f"row {n}") for n in range(3)}
    assert set(documents("owner/name:small")) == {Text(f"row {n}") for n in range(3)}


def test_a_name_that_datasets_refuses_is_explained(monkeypatch):
    def load_dataset(*args, **options):
        raise ConnectionError("hub out of reach")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert_explained("owner/name", "hub out of reach", "`name:configuration`", error=FileNotFoundError)


# --- render


def test_documents_are_rendered_plainly_without_a_chat_template():
    plain = SimpleNamespace(chat_template=None)
    assert render(Text(" as it is\n"), plain) == " as it is\n"
    assert render(Completion("1+1=", "2"), None) == "1+1=2"
    assert render(CHAT, plain) == render(CHAT, None) == "user: Hello?\nassistant: Hello."


def test_kinds_are_those_that_records_name_or_the_subfolders_of_a_folder(tmp_path):
    lines = [json.dumps({"text": f"{kind} text {number}", "kind": kind}) for kind in ("b", "a") for number in range(20)]
    (tmp_path / "kinds.jsonl").write_text("\n".join(lines))
    corpus = load_corpus(str(tmp_path / "kinds.jsonl"), held_out=0.5)
    assert list(corpus.held_out_by_kind) == ["a", "b"]
    assert sum(map(len, corpus.held_out_by_kind.values())) == len(corpus.held_out)
    assert all(text.text.startswith(kind) for kind, texts in corpus.held_out_by_kind.items() for text in texts)
    folder = tmp_path / "texts"
    for name in ("code/a.txt", "code/deep/b.txt", "prose/c.txt", "d.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"This is {name}.")
    corpus = load_corpus(str(tmp_path / "kinds.jsonl"), held_out=str(folder))
    assert {kind: len(texts) for kind, texts in corpus.held_out_by_kind.items()} == {"code": 2, "prose": 1}


@pytest.mark.parametrize("kinds", [[None], ["one"], [7, 8], [f"document {number}" for number in range(17)]])
def test_without_several_kinds_there_are_none(tmp_path, kinds):
    lines = [json.dumps({"text": f"{kind} {number}", "kind": kind}) for kind in kinds for number in range(4)]
    (tmp_path / "kinds.jsonl").write_text("\n".join(lines))
    assert load_corpus(str(tmp_path / "kinds.jsonl"), held_out=0.5).held_out_by_kind == {}
