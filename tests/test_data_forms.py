"""JSON lines, Parquet, files of token ids and conversations: what they become, and what is refused where."""

import codecs
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from fivefold.config.tree import Data, Source
from fivefold.data import documents, encode, tokenizer
from fivefold.data.check import check_data
from fivefold.data.mixture import Mixture
from fivefold.data.rows import _best_fit
from fivefold.data.samples import Samples
from fivefold.data.shards import prepare
from fivefold.data.source import DataError
from fivefold.data.store import TokenStore
from fivefold.nn.loss import IGNORED

TEXTS = ["A cat.\nA dog.", "é 日本語 🙂", 'quotes " and \\', "x" * 50]
END, MARKS = 256, ("<|im_start|>", "<|im_end|>")


def quiet(what: str, done: float) -> None:
    assert 0.0 <= done <= 1.0


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every byte is a token, 256 ends a text, 257 and 258 mark messages."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<|endoftext|>", *MARKS)])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(backend.to_str())
    return path


@pytest.fixture
def data(tmp_path: Path, byte_tokenizer: Path) -> Any:
    def of(path: Path, **keys: Any) -> Data:
        keys = {"tokenizer": str(byte_tokenizer), "validation_fraction": 0.0, **keys}
        return Data(path=str(path), cache_dir=str(tmp_path / "cache"), **keys)

    return of


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def stored(data: Data, vocab: int = 300) -> TokenStore:
    check_data(data)
    (store,) = prepare(data, vocab, quiet)
    return store


def texts(store: TokenStore) -> list[str]:
    numbers = store.read(np.array([0]), len(store))[0]
    ids = numbers >> 1 if store.manifest.answers_only else numbers
    parts = np.split(ids, np.flatnonzero(ids == store.manifest.end_of_text) + 1)
    return [store.tokenizer().decode(part[:-1].tolist()) for part in parts[:-1]]


# ---- JSON lines


def test_a_line_is_a_document(tmp_path: Path, data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "ENCODE_CHARACTERS", 20)
    file = lines(tmp_path / "a.jsonl", *({"text": text, "id": i} for i, text in enumerate(TEXTS)))
    file.write_bytes(b"\n" + file.read_bytes() + b'  \n{"text": ""}\n{"text": "last"}')
    store = stored(data(file))
    assert texts(store) == [*TEXTS, "last"]
    assert store.manifest.documents == len(TEXTS) + 1
    assert store.manifest.text_bytes == sum(len(text.encode()) for text in [*TEXTS, "last"])
    assert texts(stored(data(lines(tmp_path / "b.jsonl", {"body": "x"}), text_field="body"))) == ["x"]
    marked = tmp_path / "c.jsonl"
    marked.write_bytes(codecs.BOM_UTF8 + b'{"text": "from Windows"}\r\n')
    assert texts(stored(data(marked))) == ["from Windows"]


def test_suffixes_are_told_apart_in_a_directory(tmp_path: Path, data: Any) -> None:
    (tmp_path / "all").mkdir()
    lines(tmp_path / "all" / "b.jsonl", {"text": "from lines"})
    (tmp_path / "all" / "a.txt").write_text('{"text": "is text here"}\n')
    np.save(tmp_path / "all" / "c.npy", np.array([0, 1, END, 2]))
    np.array([3, END], dtype="<u2").tofile(tmp_path / "all" / "d.uint16.bin")
    np.array([4, END], dtype="<u4").tofile(tmp_path / "all" / "e.uint32.bin")
    (tmp_path / "all" / "f.bin").write_bytes(b"\0\1")
    store = stored(data(tmp_path / "all"))
    letters = [store.tokenizer().decode([i]) for i in range(5)]
    expected = ['{"text": "is text here"}\n', "from lines", letters[0] + letters[1], *letters[2:]]
    assert texts(store) == expected
    assert store.manifest.skipped_files == 1


BAD_LINES = [
    ('{"text": "x"', r"a.jsonl:2: not a line of JSON: "),
    ('["x"]', r"a.jsonl:2: expected a JSON object"),
    ('{"txt": "x", "n": 1}', r'a.jsonl:2: no field "text" \(fields here: txt, n\); set data.text_field$'),
    ('{"text": 3}', r'a.jsonl:2: field "text" holds no text'),
    ('{"text": "\\ud800"}', r"a.jsonl:2: not a line of JSON: "),
    ('{"messages": []}', r"set data.text_field or data.answers_only = true$"),
    ("[" * 5000, r"a.jsonl:2: not a line of JSON: "),
]


@pytest.mark.parametrize(("bad", "says"), BAD_LINES)
def test_a_bad_line_is_named(tmp_path: Path, data: Any, bad: str, says: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"text": "good"}}\n{bad}\n')
    with pytest.raises(DataError, match=says) as caught:
        stored(data(file))
    assert "\n" not in str(caught.value)
    file.write_text(f"{bad}\n")  # in the first line it is seen before any process starts
    with pytest.raises(DataError, match=says.replace(":2", ":1")):
        check_data(data(file))


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path, data: Any) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"a.jsonl:1: not a line of JSON: [^\n]*UTF-8"):
        check_data(data(tmp_path / "a.jsonl"))


def test_a_file_without_any_text_is_refused(tmp_path: Path, data: Any) -> None:
    with pytest.raises(DataError, match=r"^data.path: no document with any text in .*a.jsonl$"):
        stored(data(lines(tmp_path / "a.jsonl", {"text": ""})))


def test_a_tokenizer_is_trained_on_the_text_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"skip": "zzzz" * 9, "text": f"the cat sat on mat {i}\n" * 3} for i in range(300)]
    file = documents.File(lines(tmp_path / "a.jsonl", *records), Source(path="a.jsonl"))
    sample = list(tokenizer.spread_sample([file], 20 << 10))  # less than the file
    whole = list(tokenizer.spread_sample([file], 1 << 30))
    assert whole == [record["text"] for record in records]
    assert 20 < len(sample) < 300
    assert set(sample) <= set(whole)
    assert {whole.index(text) // 30 for text in sample} == set(range(10))  # from all over the file
    monkeypatch.setattr(tokenizer, "SAMPLE_BYTES", 20 << 10)
    monkeypatch.setattr(tokenizer, "SAMPLE_BYTES_PER_ENTRY", 1)
    assert "z" * 4 not in tokenizer.train_tokenizer([file], 270)._backend.get_vocab()


# ---- token ids


def test_ids_of_any_type_become_the_same_stream(tmp_path: Path, data: Any) -> None:
    ids = np.array([5, 6, END, 7, 8, 9])
    streams = []
    for dtype in (np.uint16, np.int64, np.int32, np.uint32):
        np.save(tmp_path / "a.npy", ids.astype(dtype))
        streams.append(stored(data(tmp_path / "a.npy")))
    for name in ("uint16", "uint32"):
        ids.astype(name).tofile(tmp_path / f"a.{name}.bin")
        streams.append(stored(data(tmp_path / f"a.{name}.bin")))
    assert len({store.manifest.digest() for store in streams}) == 1
    assert streams[0].read(np.array([0]), 7)[0].tolist() == [
        *ids.tolist(),
        END,
    ]  # a file's end ends a document
    assert streams[0].manifest.documents == 2
    assert len(streams[0]) == 7


def test_ids_are_checked_against_the_vocabulary(tmp_path: Path, data: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("fivefold.data.ids.CHUNK", 4)
    for wrong in (300, -1):
        np.save(tmp_path / "a.npy", np.array([1, 2, 3, 4, 5, wrong, 7]))
        says = rf"a.npy holds the id {wrong} \(number 5\), model.vocab is 300; "
        with pytest.raises(DataError, match=says):
            stored(data(tmp_path / "a.npy"))


def test_files_that_hold_no_ids_are_refused_before_they_are_read(tmp_path: Path, data: Any) -> None:
    wrong: dict[str, Any] = {
        "floats": np.zeros(3),
        "square": np.zeros((2, 2), dtype=int),
        "objects": np.array([{}, 1], dtype=object),
    }
    for name, array in wrong.items():
        np.save(tmp_path / f"{name}.npy", array, allow_pickle=True)
        with pytest.raises(DataError, match=rf"^data.path: [^\n]*{name}.npy [^\n]*$"):
            check_data(data(tmp_path / f"{name}.npy"))
    (tmp_path / "odd.uint16.bin").write_bytes(b"abc")
    with pytest.raises(DataError, match=r"odd.uint16.bin has 3 bytes, not a multiple of the 2 of one id"):
        check_data(data(tmp_path / "odd.uint16.bin"))
    (tmp_path / "train.bin").write_bytes(b"ab")
    with pytest.raises(DataError, match=r"train.bin: name token ids by their type, .uint16.bin or"):
        check_data(data(tmp_path / "train.bin"))
    (tmp_path / "cut.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(DataError, match=r"cut.npy is not a readable file of token ids"):
        check_data(data(tmp_path / "cut.npy"))
    np.save(tmp_path / "good.npy", np.arange(3))
    with pytest.raises(DataError, match=r"good.npy is tokenized already; set data.tokenizer"):
        check_data(data(tmp_path / "good.npy", tokenizer=""))


# ---- conversations


def asked(prompt: str, response: str) -> dict[str, str]:
    return {"prompt": prompt, "response": response}


def letters(store: TokenStore, values: list[int]) -> str:
    """Tokens as text: · = nothing to predict, | = end of text, < and > = the marks of a message."""
    special = {IGNORED: "·", END: "|", END + 1: "<", END + 2: ">"}
    return "".join(special.get(value) or store.tokenizer().decode([value]) for value in values)


def test_loss_is_on_answers_only(tmp_path: Path, data: Any) -> None:
    file = lines(tmp_path / "a.jsonl", asked("ab", "cd"), asked("", "ef"), asked("gh", ""))
    config = data(file, answers_only=True)
    store = stored(config)
    assert texts(store) == ["abcd", "ef", "gh"]
    batch = Samples(store, config, 14, 0).batch(np.array([0]))
    assert letters(store, batch.tokens[0].tolist()) == "abcd|ef|gh||||"
    assert letters(store, batch.labels[0].tolist()) == "·cd|·f|··|····"
    assert batch.documents[0].tolist() == [0] * 5 + [1] * 3 + [2] * 3 + [3] * 3
    whole = Samples(store, data(file, answers_only=True, document_mask=False), 14, 0).batch(np.array([0]))
    assert not whole.documents.any()
    assert whole.labels.tolist() == batch.labels.tolist()


def test_messages_are_chatml(tmp_path: Path, data: Any) -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A1"},
        {"role": "user", "content": "<|im_end|>"},  # written out it is text
        {"role": "assistant", "content": "A2"},
    ]
    config = data(lines(tmp_path / "a.jsonl", {"messages": messages}), answers_only=True)
    store = stored(config)
    tokens = "<system\nS>\n<user\nQ>\n<assistant\nA1>\n<user\n" + "<|im_end|>" + ">\n<assistant\nA2>\n|"
    batch = Samples(store, config, len(tokens) - 1, 0).batch(np.array([0]))
    assert letters(store, batch.tokens[0].tolist()) == tokens[:-1]
    learnt = letters(store, batch.labels[0].tolist())
    assert [part for part in learnt.split("·") if part] == ["A1>", "A2>", "|"]
    assert learnt.index("A2>") + 1 == tokens.index("A2>")


def test_marks_are_text_where_the_tokenizer_has_none(tmp_path: Path) -> None:
    message = {"role": "assistant", "content": "hello hello hello hello"}
    file = lines(tmp_path / "a.jsonl", {"messages": [message]})
    config = Data(path=str(file), cache_dir=str(tmp_path / "cache"), answers_only=True)
    (store,) = prepare(config, 257, quiet)
    assert texts(store) == [f"<|im_start|>assistant\n{message['content']}<|im_end|>\n"]
    learnt = (store.read(np.array([0]), len(store))[0] & 1).sum()
    assert learnt == len(message["content"] + "<|im_end|>") + 1


BAD_CONVERSATIONS = [
    ({"text": "x"}, r'a.jsonl:1: a conversation needs "prompt" and "response" \(both text\) or "messages"'),
    ({"prompt": "x", "response": None}, "a.jsonl:1: a conversation needs"),
    ({"messages": [{"role": "user", "content": "x"}]}, 'no message with the role "assistant"'),
    ({"messages": []}, 'no message with the role "assistant"'),
    (
        {"messages": [{"role": "assistant", "content": [1]}]},
        'a.jsonl:1: message 1 needs "role" and "content"',
    ),
]


@pytest.mark.parametrize(("record", "says"), BAD_CONVERSATIONS)
def test_a_bad_conversation_is_named(tmp_path: Path, data: Any, record: object, says: str) -> None:
    with pytest.raises(DataError, match=says) as caught:
        check_data(data(lines(tmp_path / "a.jsonl", record), answers_only=True))
    assert "\n" not in str(caught.value)


def test_text_holds_no_conversations(tmp_path: Path, data: Any) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"^data.answers_only: .*a.txt holds no conversations"):
        check_data(data(tmp_path / "a.txt", answers_only=True))
    with pytest.raises(DataError, match="holds no conversations"):  # also under a launcher
        prepare(data(tmp_path / "a.txt", answers_only=True), 300, quiet)


def test_a_cache_inside_the_data_holds_no_conversations(tmp_path: Path, data: Any) -> None:
    (tmp_path / "in").mkdir()
    lines(tmp_path / "in" / "a.jsonl", asked("a", "b"))
    config = data(tmp_path / "in", answers_only=True)
    config = msgspec.structs.replace(config, cache_dir=str(tmp_path / "in" / "cache"))
    assert stored(config).directory == stored(config).directory


@given(
    sizes=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=12),
    length=st.integers(1, 30),
)
@settings(max_examples=40, deadline=None)
def test_every_answer_is_learnt_once_and_none_is_cut_unless_longer(
    tmp_path_factory: pytest.TempPathFactory,
    byte_tokenizer: Path,
    sizes: list[tuple[int, int]],
    length: int,
) -> None:
    directory = tmp_path_factory.mktemp("packed")
    sizes = [*sizes, (1, 1)]  # one of them has something to learn
    records = [asked("p" * prompt, chr(ord("A") + i) * answer) for i, (prompt, answer) in enumerate(sizes)]
    file = lines(directory / "a.jsonl", *records)
    config = Data(
        path=str(file),
        cache_dir=str(directory / "cache"),
        tokenizer=str(byte_tokenizer),
        validation_fraction=0.0,
        answers_only=True,
    )
    (store,) = prepare(config, 300, quiet)
    samples = Samples(store, config, length, 0)
    batch = samples.batch(np.arange(samples.count))
    rows = [letters(store, row) for row in batch.labels.tolist()]
    assert all(row.strip("·") for row in rows)  # no sample without anything to learn
    learnt = "".join(rows).replace("·", "")
    expected = [
        record["response"][prompt == 0 :] + "|" for record, (prompt, _) in zip(records, sizes, strict=True)
    ]
    assert sorted(learnt) == sorted(
        "".join(text for text, (p, a) in zip(expected, sizes, strict=True) if p + a)
    )
    for record, (prompt, answer) in zip(records, sizes, strict=True):
        letter = record["response"][:1]
        found = [row for row in rows if letter and letter in row]
        if prompt + answer <= length:  # with its end of text one more, which no one reads
            assert len(found) <= 1
    counts = np.bincount(samples._rows.predicted(np.arange(samples.count)), minlength=300)
    assert samples.predicted_counts().tolist() == counts.tolist()
    inputs = [letters(store, row) for row in batch.tokens.tolist()]
    for row, labels, within in zip(inputs, rows, batch.documents.tolist(), strict=True):
        for place in range(length - 1):  # what a place is to predict comes next, in the same document
            if labels[place] != "·":
                assert labels[place] == row[place + 1]
                assert within[place] == within[place + 1]


def test_a_long_conversation_is_cut_into_several_samples(tmp_path: Path, data: Any) -> None:
    config = data(
        lines(tmp_path / "a.jsonl", asked("ab", "cd"), asked("p" * 9, "0123456789"), asked("e", "f")),
        answers_only=True,
    )
    store = stored(config)
    samples = Samples(store, config, 8, 0)
    batch = samples.batch(np.arange(samples.count))
    assert [letters(store, row) for row in batch.tokens.tolist()] == ["abcd|789", "p0123456", "ef||||||"]
    assert [letters(store, row) for row in batch.labels.tolist()] == ["·cd|·89|", "01234567", "f|······"]


def test_rows_are_well_filled_and_never_overfull() -> None:
    sizes = np.clip(np.random.default_rng(0).lognormal(5.0, 0.8, 20_000), 2, 513).astype(int)
    rows = np.array(_best_fit(sizes.tolist(), 513))
    filled = np.bincount(rows, weights=sizes)
    assert filled.min() > 0
    assert filled.max() <= 513
    assert filled.mean() > 0.95 * 513


def test_held_out_conversations_are_not_trained_on(tmp_path: Path, data: Any) -> None:
    records = [asked(f"{i:03}", chr(ord("A") + i % 26) * (1 + i % 7)) for i in range(200)]
    config = data(lines(tmp_path / "a.jsonl", *records), answers_only=True, validation_fraction=0.2)
    mixture = Mixture([stored(config)], config, 24, seed=1)
    samples = mixture._samples[0]
    training = set(mixture.sample_ids(0, samples.training_count).tolist())
    held_out = set(samples.validation_ids(np.arange(samples.validation_count)).tolist())
    assert training | held_out == set(range(samples.count))
    assert not training & held_out
    counts = np.bincount(samples._rows.predicted(np.array(sorted(training))), minlength=300)
    assert samples.predicted_counts().tolist() == counts.tolist()


# ---- Parquet


def test_a_parquet_file_needs_pyarrow(tmp_path: Path, data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "find_spec", lambda name: None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"a.parquet is a Parquet file, .* pip install 'fivefold\[parquet\]'"):
        check_data(data(tmp_path / "a.parquet"))


def test_parquet_equals_json_lines(tmp_path: Path, data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(documents, "ROWS", 3)
    records = [{"text": f"{text} {i}", "n": i} for i, text in enumerate(TEXTS * 3)]
    talks = [{"messages": [{"role": "assistant", "content": text}]} for text in TEXTS]
    for rows, keys in ((records, {}), (talks, {"answers_only": True})):
        parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=5)
        lines(tmp_path / "a.jsonl", *rows)
        stores = [stored(data(tmp_path / f"a.{form}", **keys)) for form in ("parquet", "jsonl")]
        assert stores[0].manifest.digest() == stores[1].manifest.digest()
        assert stores[0].manifest.counts == stores[1].manifest.counts
    parquet.write_table(arrow.Table.from_pylist(records), tmp_path / "a.parquet", row_group_size=5)
    file = documents.File(tmp_path / "a.parquet", Source(path="a.parquet"))
    sample = list(documents.sample(file, file.path.stat().st_size * 2 // 3, 12))
    assert sample == [record["text"] for record in records[10:][: len(sample)]]
    assert sum(map(len, sample)) >= 12
    with pytest.raises(DataError, match=r'a.parquet, row 1: no field "body" \(fields here: text, n\)'):
        check_data(data(tmp_path / "a.parquet", text_field="body"))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"a.parquet is not a readable Parquet file: [^\n]*$"):
        check_data(data(tmp_path / "a.parquet"))
    assert "pyarrow" in sys.modules
