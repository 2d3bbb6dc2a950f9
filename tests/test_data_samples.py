"""Order and content of samples: what may never depend on layout, batch size or interruptions."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config.tree import Data
from fivefold.data.mixture import Mixture
from fivefold.data.permutation import permute
from fivefold.data.rows import Batch
from fivefold.data.samples import Samples
from fivefold.data.shards import ShardWriter, prepare
from fivefold.data.source import DataError
from fivefold.data.store import FORMAT, Manifest, TokenStore, token_dtype
from fivefold.nn.loss import IGNORED

END = 0


def store_of(directory: Path, tokens: list[int], vocab: int = 100) -> TokenStore:
    """A store that holds exactly `tokens`; id 0 ends a document."""
    writer = ShardWriter(directory, vocab)
    writer.write(np.array(tokens, dtype=np.int64))
    writer.finish()
    manifest = Manifest(
        format=FORMAT,
        fingerprint="",
        source="tokens of a test",
        vocab=vocab,
        answers_only=False,
        dtype=token_dtype(vocab),
        end_of_text=END,
        tokens=len(tokens),
        documents=tokens.count(END),
        text_bytes=0,
        skipped_files=0,
        block_bytes=writer.block_bytes,
        shard_tokens=writer.shard_tokens,
        shards=writer.shards,
        tokenizer_checksum=0,
        counts=np.bincount(tokens, minlength=vocab).tolist(),
    )
    return TokenStore(directory, manifest)


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Samples]:
    """Samples(number, …) of two tokens each."""
    store = store_of(tmp_path_factory.mktemp("counted"), [1 + i % 99 for i in range(2 * 500 + 1)])

    def samples(number: int = 500, fraction: float = 0.0, seed: int = 0) -> Samples:
        assert 500 % number == 0
        return Samples(store, Data(validation_fraction=fraction), 1000 // number, seed)

    return samples


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 10**9))
@settings(max_examples=60, deadline=None)
def test_permutation_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, seed, epoch)), np.arange(size))


@given(size=st.integers(1, 2**62), places=st.lists(st.floats(0, 1, exclude_max=True), max_size=20))
@settings(max_examples=60, deadline=None)
def test_any_place_is_computed_alone(size: int, places: list[float]) -> None:
    wanted = np.array([min(int(place * size), size - 1) for place in places], dtype=np.int64)
    together = permute(wanted, size, 3, 1)
    assert together.tolist() == [permute(wanted[i : i + 1], size, 3, 1)[0] for i in range(len(wanted))]
    assert all(0 <= value < size for value in together.tolist())


@pytest.mark.parametrize("size", [5, 17, 64, 1025])
def test_permutation_looks_random(size: int) -> None:
    # Over many epochs every place should see every value: mean (size-1)/2, no correlation between neighbours.
    orders = np.stack([permute(np.arange(size), size, 7, epoch) for epoch in range(400)]).astype(float)
    spread = np.sqrt((size**2 - 1) / 12 / 400)  # standard error of a place's mean over the epochs
    assert abs(orders.mean(axis=0) - (size - 1) / 2).max() < 5 * spread
    neighbours = np.corrcoef(orders[:, :-1].ravel(), orders[:, 1:].ravel())[0, 1]
    assert abs(neighbours + 1 / (size - 1)) < 5 / np.sqrt(400 * (size - 1))  # -1/(n-1) is what sampling gives
    assert len({tuple(order) for order in orders}) > (100 if size == 5 else 399)


def test_permutation_is_fixed_for_good() -> None:
    # A resumed run must find the order it began with: a change here breaks every checkpoint.
    assert permute(np.arange(10), 10, 0, 0).tolist() == [7, 2, 6, 0, 5, 1, 3, 9, 8, 4]


@given(
    fraction=st.sampled_from([0.0, 0.01, 0.3]),
    cuts=st.lists(st.integers(1, 400), min_size=4, max_size=4),
    batches=st.lists(st.integers(1, 97), min_size=4, max_size=4),
)
@settings(max_examples=25, deadline=None)
def test_three_interruptions_leave_no_gap_and_no_repeat(
    counted: Callable[..., Samples], fraction: float, cuts: list[int], batches: list[int]
) -> None:
    seen: list[int] = []
    for steps, batch in zip(cuts, batches, strict=True):  # each run goes on with another global batch
        samples = counted(fraction=fraction)
        for _ in range(max(1, steps // batch)):
            seen += samples.sample_ids(len(seen), batch).tolist()
    assert seen == counted(fraction=fraction).sample_ids(0, len(seen)).tolist()
    size = samples.training_count
    for epoch in range(len(seen) // size):
        assert len(set(seen[epoch * size : (epoch + 1) * size])) == size


def test_epochs_differ_and_seeds_differ(counted: Callable[..., Samples]) -> None:
    first, second = counted().sample_ids(0, 500), counted().sample_ids(500, 500)
    assert sorted(first) == sorted(second) == list(range(500))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, counted(seed=1).sample_ids(0, 500))
    assert counted().sample_ids(0, 1700).tolist()[450:550] == counted().sample_ids(450, 100).tolist()


@pytest.mark.parametrize("number", [1, 2, 5, 50, 250, 500])
@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.01, 0.126, 0.5, 0.9, 0.999])
def test_validation_and_training_part_the_samples(
    counted: Callable[..., Samples], number: int, fraction: float
) -> None:
    samples = counted(number, fraction)
    training = sorted(samples.sample_ids(0, samples.training_count).tolist())
    held_out = sorted(set(range(number)) - set(training))  # so no predicted token is shared either
    assert len(training) == len(set(training)) == number - len(held_out) == samples.training_count
    assert len(held_out) == samples.validation_count
    assert (len(held_out) > 0) == (fraction > 0 and number > 1)
    if held_out:
        assert sorted(samples.validation_ids(np.arange(len(held_out)))) == held_out
        assert set(counted(number, fraction, seed=9).sample_ids(0, len(training))) == set(training)
    wanted = min(max(1, number * fraction), number - 1)
    assert len(held_out) == pytest.approx(wanted if fraction else 0, rel=0.07, abs=1)


def test_digest_tells_whether_a_counter_means_the_same_samples(counted: Callable[..., Samples]) -> None:
    same = counted(500, 0.1).digest()
    assert same == counted(500, 0.1, seed=1).digest()  # the seed is compared by itself
    assert len({same, counted(250, 0.1).digest(), counted(500, 0.2).digest()}) == 3


def test_validation_comes_from_all_over_the_text(counted: Callable[..., Samples]) -> None:
    samples = counted(500, 0.1)
    first = samples.validation_ids(np.arange(20))
    assert first.max() - first.min() > 300
    assert len(np.unique(first // 25)) > 15


def test_validation_batches_have_full_rows_and_count_each_sample_once(
    counted: Callable[..., Samples],
) -> None:
    samples = counted(500, 0.02)  # 10 samples of 2 tokens
    mixture = Mixture([samples._store], Data(validation_fraction=0.02), 2, seed=0)
    batches = list(mixture.validation_batches(4, limit=100))
    assert [batch.tokens.shape for batch in batches] == [(4, 2)] * 3
    assert [batch.loss_tokens for batch in batches] == [8, 8, 4]
    held_out = set(range(500)) - set(samples.sample_ids(0, samples.training_count).tolist())
    first_tokens = torch.cat([batch.tokens[:, 0] for batch in batches])[:10].tolist()
    assert sorted(first_tokens) == sorted(1 + 2 * i % 99 for i in held_out)
    assert len(list(mixture.validation_batches(4, limit=2))) == 2
    nothing = Mixture([samples._store], Data(validation_fraction=0.0), 2, seed=0)
    assert list(nothing.validation_batches(4, limit=2)) == []


def test_rows_labels_and_documents_of_a_hand_made_stream(tmp_path: Path) -> None:
    stream = [5, 6, END, 7, END, END, 8, 9, END, 3]
    store = store_of(tmp_path, stream)
    masked = Samples(store, Data(validation_fraction=0.0), 4, seed=0).batch(np.array([1, 0]))
    assert masked.tokens.tolist() == [[END, END, 8, 9], [5, 6, END, 7]]
    assert masked.labels.tolist() == [[IGNORED, IGNORED, 9, END], [6, END, IGNORED, END]]
    assert masked.documents.tolist() == [[0, 1, 2, 2], [0, 0, 0, 1]]
    assert masked.loss_tokens == 5
    assert (masked.tokens.dtype, masked.labels.dtype) == (torch.int64, torch.int64)
    assert masked.documents.dtype == torch.int32

    whole = Samples(store, Data(validation_fraction=0.0, document_mask=False), 4, seed=0)
    plain = whole.batch(np.array([0, 1]))
    assert plain.labels.tolist() == [[6, END, 7, END], [END, 8, 9, END]]
    assert plain.documents.tolist() == [[0] * 4] * 2
    assert plain.loss_tokens == 8


def test_rows_and_device() -> None:
    tokens = torch.arange(12).reshape(4, 3)
    batch = Batch(tokens, tokens + 1, torch.zeros(4, 3, dtype=torch.int32))
    middle = batch.rows(1, 3).to("cpu")
    assert middle.tokens.tolist() == [[3, 4, 5], [6, 7, 8]]
    assert middle.labels.tolist() == [[4, 5, 6], [7, 8, 9]]
    assert middle.documents.shape == (2, 3)
    assert sum(batch.rows(i, i + 1).loss_tokens for i in range(4)) == batch.loss_tokens == 12


def test_too_little_text_is_refused_with_numbers(tmp_path: Path) -> None:
    store = store_of(tmp_path, [1, 2, 3, 4])
    assert Samples(store, Data(), 3, seed=0).training_count == 1
    with pytest.raises(DataError, match=r"has 4 tokens, .*sequence_length 4 needs 5"):
        Samples(store, Data(), 4, seed=0)


@pytest.mark.parametrize(("length", "fraction"), [(7, 0.0), (7, 0.2), (10, 0.01), (3, 0.5)])
def test_unigram_entropy_equals_a_direct_computation(tmp_path: Path, length: int, fraction: float) -> None:
    stream = np.random.default_rng(0).zipf(1.5, 20_000) % 50
    data = Data(validation_fraction=fraction)
    samples = Mixture([store_of(tmp_path, stream.tolist())], data, length, 0)
    ids = np.unique(samples.sample_ids(0, 2 * 20_000 // length))  # each training sample once
    predicted = np.concatenate([stream[i * length + 1 : (i + 1) * length + 1] for i in ids])
    _, counts = np.unique(predicted, return_counts=True)
    expected = -(counts / counts.sum() * np.log(counts / counts.sum())).sum()
    assert samples.unigram_entropy() == pytest.approx(expected, rel=1e-13)


def test_global_random_states_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("the cat sat on the mat, the dog on the log\n" * 20)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    data = Data(path=str(tmp_path / "text"), cache_dir=str(tmp_path / "cache"), validation_fraction=0.2)
    samples = Mixture(prepare(data, 270, lambda *_: None), data, 4, seed=0)
    samples.batch(samples.sample_ids(3, 10))
    list(samples.validation_batches(2, 2))
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])
