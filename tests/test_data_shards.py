"""Text → tokenizer → shards: nothing lost, nothing half-finished taken for finished, damage noticed."""

import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from fivefold.config.tree import Data, Source
from fivefold.data import encode, shards, source, tokenizer
from fivefold.data.documents import File
from fivefold.data.shards import Progress
from fivefold.data.source import DataError, is_text, text_files, text_pieces
from fivefold.data.store import TokenStore, open_store
from fivefold.data.tokenizer import load_tokenizer, spread_sample, train_tokenizer

EMAIL = Path(sysconfig.get_path("stdlib"), "email")  # real text: 30 files, 0.4 MB
DOCUMENTS = [
    "A cat.\nA dog.\r\n\n\n   é 日本語 🙂 \t end",
    "written out: <|endoftext|> is text",
    "no newline " * 40,
]

PREPARE = """
import sys
from fivefold.config.tree import Data
from fivefold.data.shards import prepare
print("started", flush=True)
data = Data(path=sys.argv[1], cache_dir=sys.argv[2])
(store,) = prepare(data, 1024, lambda what, done: print(what, flush=True))
print(store.directory, store.manifest.digest())
"""


def quiet(what: str, done: float) -> None:
    assert what
    assert 0.0 <= done <= 1.0


def prepare(data: Data, vocab: int, progress: Progress) -> TokenStore:
    (store,) = shards.prepare(data, vocab, progress)
    return store


def files_of(*paths: Path) -> list[File]:
    return [File(path, Source(path=str(path))) for path in paths]


def corpus(directory: Path, documents: list[str]) -> Path:
    directory.mkdir()
    for number, text in enumerate(documents):
        (directory / f"{number}.txt").write_bytes(text.encode())
    return directory


def stream(store: TokenStore) -> list[int]:
    return store.read(np.array([0]), len(store))[0].tolist()


def documents_of(store: TokenStore) -> list[str]:
    """The text of every document, decoded from the shards."""
    documents: list[list[int]] = [[]]
    for token in stream(store):
        if token == store.manifest.end_of_text:
            documents.append([])
        else:
            documents[-1].append(token)
    assert documents.pop() == []
    return [store.tokenizer().decode(document) for document in documents]


@pytest.fixture(scope="module")
def email(tmp_path_factory: pytest.TempPathFactory) -> tuple[Data, TokenStore]:
    data = Data(path=str(EMAIL), cache_dir=str(tmp_path_factory.mktemp("cache")))
    return data, prepare(data, 1024, quiet)


# ---- source


def test_the_standard_library_is_found_without_installed_packages() -> None:
    files = text_files("python:stdlib")
    assert len(files) > 500
    assert files == sorted(files, key=lambda file: file.as_posix())
    assert all(file.suffix == ".py" for file in files)
    assert not any({"site-packages", "__pycache__"} & set(file.parts) for file in files)


def test_hidden_files_are_left_out_and_subdirectories_entered(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", ".git/config", ".hidden", "a/__pycache__/x.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    assert [str(file.relative_to(tmp_path)) for file in text_files(str(tmp_path))] == ["a/z.md", "b.txt"]
    assert text_files(str(tmp_path / "b.txt")) == [tmp_path / "b.txt"]


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_nothing_to_read_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=rf"^data.path: .*{name}[^\n]*$"):
        text_files(str(tmp_path / name))


def test_pieces_join_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "PIECE_BYTES", 16)
    for number, text in enumerate([*DOCUMENTS, "", "日本語" * 50]):
        file = tmp_path / str(number)
        file.write_bytes(text.encode())
        pieces = list(text_pieces(file))
        assert "".join(pieces) == text
        assert all(len(piece.encode()) <= 2 * 16 + 3 for piece in pieces)


@pytest.mark.parametrize("content", [b"a\0b", b"caf\xe9", b"cut \xe6\x97", b"x" * 40 + b"\0"])
def test_binary_is_not_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(source, "PIECE_BYTES", 16)
    (tmp_path / "file").write_bytes(content)
    assert not is_text(tmp_path / "file")


def test_sample_is_spread_over_the_text_and_bounded() -> None:
    paths = text_files(str(EMAIL.parent / "asyncio"))
    files = files_of(*paths)
    whole = sum(path.stat().st_size for path in paths)
    assert sum(len(text.encode()) for text in spread_sample(files, whole)) == whole
    sample = list(spread_sample(files, whole // 4))
    assert sample == list(spread_sample(files, whole // 4))
    assert whole / 8 < sum(len(text.encode()) for text in sample) < whole / 3
    texts = [path.read_text() for path in paths]
    found = [sum(piece in text for piece in sample) for text in texts]
    assert sum(found) >= len(sample)  # each block is real text, from its line start
    assert sum(count > 0 for count in found) > len(files) / 3


# ---- tokenizer


def test_trained_vocabulary_is_exact_and_always_the_same() -> None:
    files = files_of(*text_files(str(EMAIL)))
    first, second = train_tokenizer(files, 700), train_tokenizer(files, 700)
    assert first.size == 700
    assert first.end_of_text == 0
    assert first._backend.to_str() == second._backend.to_str()


def test_too_small_a_text_names_what_it_could_make(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("hello hello world")
    with pytest.raises(DataError, match=r"model.vocab is 500, .* 17 bytes .* only (\d+) entries") as caught:
        train_tokenizer(files_of(tmp_path / "a"), 500)
    possible = int(str(caught.value).split(" entries")[0].split()[-1])
    assert train_tokenizer(files_of(tmp_path / "a"), possible).size == possible
    with pytest.raises(DataError, match="at least 257"):
        train_tokenizer(files_of(tmp_path / "a"), 256)


def test_sample_grows_where_it_makes_too_few_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("aaaa aaaa\n" * 10_000 + EMAIL.joinpath("message.py").read_text())
    monkeypatch.setattr(tokenizer, "SAMPLE_BYTES", 4096)
    monkeypatch.setattr(tokenizer, "SAMPLE_BYTES_PER_ENTRY", 1)
    assert train_tokenizer(files_of(tmp_path / "a"), 400).size == 400


def foreign(file: Path, end: str, words: int = 0) -> Path:
    """A tokenizer.json as other people publish them: with truncation, padding and its own end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) + [f"word{i}" for i in range(words)]
    backend = Backend(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(end, special=True)])
    backend.enable_truncation(5)
    backend.enable_padding(length=8)
    backend.save(str(file))
    return file


@pytest.mark.parametrize("end", ["</s>", "<|end_of_text|>", "<eos>"])
def test_a_foreign_tokenizer_is_used_whole(tmp_path: Path, end: str) -> None:
    text = corpus(tmp_path / "text", DOCUMENTS)
    data = Data(
        path=str(text), cache_dir=str(tmp_path / "c"), tokenizer=str(foreign(tmp_path / "t.json", end))
    )
    store = prepare(data, 300, quiet)
    assert store.manifest.end_of_text == 256
    assert documents_of(store) == DOCUMENTS


def test_an_unfit_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ids up to 300, model.vocab is 300; set model.vocab to 301"):
        load_tokenizer(foreign(tmp_path / "large.json", "</s>", words=44), 300)
    with pytest.raises(DataError, match="no end-of-text token"):
        load_tokenizer(foreign(tmp_path / "endless.json", "<pad>"), 300)
    (tmp_path / "broken.json").write_text('{"model": ')
    for name in ("broken.json", "absent.json"):
        with pytest.raises(DataError, match=rf"{name} is not a readable tokenizer.json[^\n]*$"):
            load_tokenizer(tmp_path / name, 300)


# ---- shards


def test_round_trip_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "PIECE_BYTES", 64)  # documents in several pieces,
    monkeypatch.setattr(encode, "ENCODE_CHARACTERS", 100)  # batches that end inside documents,
    monkeypatch.setattr(shards, "BLOCK_BYTES", 32)  # and rows that cross blocks and shards
    monkeypatch.setattr(shards, "SHARD_BLOCKS", 3)
    text = corpus(tmp_path / "text", [*DOCUMENTS, ""])
    (text / "picture.png").write_bytes(b"\x89PNG\r\n\0\0")
    store = prepare(Data(path=str(text), cache_dir=str(tmp_path / "cache")), 270, quiet)
    assert documents_of(store) == DOCUMENTS
    manifest = store.manifest
    assert len(manifest.shards) > 3
    assert (manifest.documents, manifest.skipped_files) == (3, 1)
    assert manifest.text_bytes == sum(len(document.encode()) for document in DOCUMENTS)
    tokens = stream(store)
    assert manifest.counts == np.bincount(tokens, minlength=270).tolist()
    starts = np.array([0, 7, len(tokens) - 60, 45])
    assert store.read(starts, 60).tolist() == [tokens[start : start + 60] for start in starts]
    store.verify()


def test_real_text_survives_and_is_prepared_once(email: tuple[Data, TokenStore]) -> None:
    data, store = email
    assert documents_of(store) == [
        text for file in text_files(str(EMAIL)) if (text := file.read_bytes().decode())
    ]
    assert store.manifest.text_bytes / store.manifest.tokens > 2.5  # bytes a token: merges were learnt

    def nothing(what: str, done: float) -> None:
        raise AssertionError(f"prepared again: {what}")

    assert prepare(data, 1024, nothing).directory == store.directory
    assert open_store(store.directory).manifest.digest() == store.manifest.digest()


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(65536, "uint16"), (65537, "uint32"), (2, "uint16"), (10**6, "uint32")]
)
def test_shards_hold_the_highest_id(tmp_path: Path, vocab: int, dtype: str) -> None:
    writer = shards.ShardWriter(tmp_path, vocab)
    writer.write(np.array([0, vocab - 1, 1]))
    writer.finish()
    written = np.fromfile(tmp_path / "shard-00000.bin", dtype="<" + {"uint16": "u2", "uint32": "u4"}[dtype])
    assert written.tolist() == [0, vocab - 1, 1]


def test_wide_vocabulary_end_to_end(tmp_path: Path) -> None:
    text = corpus(tmp_path / "text", DOCUMENTS)
    wide = foreign(tmp_path / "t.json", "</s>", words=70_000)
    data = Data(path=str(text), cache_dir=str(tmp_path / "cache"), tokenizer=str(wide))
    store = prepare(data, 80_000, quiet)
    assert (store.manifest.dtype, store.manifest.end_of_text) == ("uint32", 70_256)
    assert documents_of(store) == DOCUMENTS


def test_what_the_tokens_depend_on_is_in_the_fingerprint(tmp_path: Path) -> None:
    text = corpus(tmp_path / "text", DOCUMENTS)
    data = Data(path=str(text), cache_dir=str(tmp_path / "cache"))
    first = prepare(data, 270, quiet)
    other_vocab = prepare(data, 271, quiet)
    os.utime(text / "0.txt", ns=(1, 1))
    touched = prepare(data, 270, quiet)
    (text / "0.txt").write_text("other")
    changed = prepare(data, 270, quiet)
    given = Data(
        path=str(text), cache_dir=data.cache_dir, tokenizer=str(foreign(tmp_path / "t.json", "</s>"))
    )
    stores = [first, other_vocab, touched, changed, prepare(given, 270, quiet)]
    assert len({store.directory for store in stores}) == 5
    digests = [store.manifest.digest() for store in stores]
    assert digests[0] == digests[2]  # same text, same tokens
    assert len(set(digests)) == 4


def test_cache_inside_the_data_is_not_data(tmp_path: Path) -> None:
    text = corpus(tmp_path / "text", DOCUMENTS)
    data = Data(path=str(text), cache_dir=str(text / "cache"))
    assert prepare(data, 270, quiet).directory == prepare(data, 270, quiet).directory


def test_no_text_and_no_room_are_one_line(tmp_path: Path) -> None:
    binary = corpus(tmp_path / "binary", [])
    (binary / "x.bin").write_bytes(b"\0\1")
    (binary / "empty.txt").write_text("")
    with pytest.raises(DataError, match=r"^data.path: no text in the 2 files[^\n]*$"):
        prepare(Data(path=str(binary), cache_dir=str(tmp_path / "cache")), 270, quiet)
    (tmp_path / "file").write_text("in the way")
    blocked = Data(path=str(corpus(tmp_path / "text", DOCUMENTS)), cache_dir=str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"^cannot tokenize .*Not a directory[^\n]*$"):
        prepare(blocked, 270, quiet)


def test_files_that_change_meanwhile_are_noticed(tmp_path: Path) -> None:
    text = corpus(tmp_path / "text", DOCUMENTS)

    def interfere(what: str, done: float) -> None:
        if what == "tokenizing":
            (text / "1.txt").write_text("written meanwhile")

    data = Data(path=str(text), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"^data.path: files of .* changed while"):
        prepare(data, 270, interfere)
    assert documents_of(prepare(data, 270, quiet))[1] == "written meanwhile"


# ---- damage, kills, races


@pytest.mark.parametrize(
    ("name", "cut", "message"),
    [
        ("shard-00000.bin", 100, r"shard-00000.bin has \d+ bytes instead of"),
        ("shard-00000.bin", 0, "shard-00000.bin: bytes 0 to .* have changed"),
        ("tokenizer.json", 0, "tokenizer.json has changed"),
        ("manifest.json", 200, "manifest.json cannot be read"),
        ("manifest.json", -1, "no finished token store"),
        ("shard-00000.bin", -1, "shard-00000.bin is missing"),
    ],
)
def test_damage_is_one_clear_line(tmp_path: Path, name: str, cut: int, message: str) -> None:
    data = Data(path=str(corpus(tmp_path / "text", DOCUMENTS)), cache_dir=str(tmp_path / "cache"))
    directory = prepare(data, 270, quiet).directory
    content = bytearray((directory / name).read_bytes())
    if cut < 0:  # the file is gone
        (directory / name).unlink()
    elif cut:  # truncated
        (directory / name).write_bytes(content[:-cut])
    else:  # one bit flipped
        content[len(content) // 2] ^= 1
        (directory / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{message}[^\n]*$"):
        open_store(directory)
    if (directory / "manifest.json").exists():  # silence would hide a failing disk
        with pytest.raises(DataError, match="delete the directory"):
            prepare(data, 270, quiet)
    else:
        assert documents_of(prepare(data, 270, quiet)) == DOCUMENTS


def test_another_format_is_named(tmp_path: Path) -> None:
    data = Data(path=str(corpus(tmp_path / "text", DOCUMENTS)), cache_dir=str(tmp_path / "cache"))
    manifest = prepare(data, 270, quiet).directory / "manifest.json"
    manifest.write_text(json.dumps({"format": 99}))
    with pytest.raises(DataError, match="written in format 99, this Fivefold reads 2"):
        open_store(manifest.parent)


def start(cache: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PREPARE, str(EMAIL), str(cache)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


def test_killed_at_any_moment_it_is_done_again(tmp_path: Path, email: tuple[Data, TokenStore]) -> None:
    began = time.monotonic()
    reference = start(tmp_path / "reference").communicate()[0].split()
    whole = time.monotonic() - began
    moments = random.Random(0)
    for _ in range(5):
        process = start(tmp_path / "cache")
        time.sleep(moments.uniform(0.0, whole * 0.8))
        process.kill()
        process.communicate()
        for directory in (tmp_path / "cache").glob("*"):  # what is there is finished, or says it is not
            if (directory / "manifest.json").exists():
                open_store(directory).verify()
                for file in directory.iterdir():  # begin anew, or the next kill would meet a finished store
                    file.unlink()
            else:
                with pytest.raises(DataError, match="no finished token store"):
                    open_store(directory)
    assert start(tmp_path / "cache").communicate()[0].split()[-1] == reference[-1]
    assert reference[-1] == email[1].manifest.digest()


DIE_AT_SYNC = """
import os, signal
from fivefold.data import shards
sync, calls = shards._sync, 0
def dying(path):
    global calls
    calls += 1
    if calls == NUMBER:
        os.kill(os.getpid(), signal.SIGKILL)
    sync(path)
shards._sync = dying
"""


@pytest.mark.parametrize("number", [1, 2, 3, 4])  # shard, tokenizer, unfinished manifest, directory
def test_killed_while_it_is_completed(tmp_path: Path, email: tuple[Data, TokenStore], number: int) -> None:
    script = DIE_AT_SYNC.replace("NUMBER", str(number)) + PREPARE
    command = [sys.executable, "-c", script, str(EMAIL), str(tmp_path)]
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob("*/manifest.json"))) == (number == 4)  # only the rename finishes a store
    data = Data(path=str(EMAIL), cache_dir=str(tmp_path))
    store = prepare(data, 1024, quiet)
    store.verify()
    assert store.manifest.digest() == email[1].manifest.digest()


def test_two_at_once_work_once(tmp_path: Path) -> None:
    outputs = [process.communicate()[0] for process in (start(tmp_path), start(tmp_path))]
    assert len({output.splitlines()[-1] for output in outputs}) == 1
    assert sum("tokenizing" in output for output in outputs) == 1
