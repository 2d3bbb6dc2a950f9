"""Mixtures: exact shares, an order no layout, batch size or interruption can change, and whole runs of them."""

import json
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.cli.main import main
from fivefold.config.errors import BadInput, ConfigError
from fivefold.config.load import load, parse
from fivefold.config.tree import Data, Source
from fivefold.data.check import check_data
from fivefold.data.mixture import Mixture, prepared_digest
from fivefold.data.shards import prepare
from fivefold.data.source import DataError
from fivefold.data.store import TokenStore
from fivefold.data.turns import Turns
from fivefold.nn.loss import IGNORED
from fivefold.spec.legal import resolve_config
from fivefold.trainer.identity import check_resume

WEIGHTS = st.lists(
    st.one_of(st.integers(1, 50), st.sampled_from([0.1, 0.25, 0.7, 1e-3, 12.5, 1000])), min_size=1, max_size=6
)
WORDS = ("the", "cat", "dog", "sat", "mat", "log", "on", "a", "and", "ran")


def quiet(what: str, done: float) -> None:
    assert 0.0 <= done <= 1.0


# ---- whose turn it is


@given(weights=WEIGHTS, seed=st.integers(0, 2**64), start=st.integers(0, 10**15))
@settings(max_examples=60, deadline=None)
def test_shares_never_leave_a_fixed_bound(weights: list[float], seed: int, start: int) -> None:
    turns = Turns(weights, seed)
    counters = np.arange(400, dtype=np.int64)
    sources, places = turns.at(counters)
    exact = [Fraction(str(weight)) / sum(Fraction(str(other)) for other in weights) for weight in weights]
    heaviest_first = sorted(range(len(weights)), key=lambda source: -exact[source])
    counts = [0] * len(weights)
    for source, place in zip(sources.tolist(), places.tolist(), strict=True):
        assert place == counts[source]  # each source's own counter, without a gap
        counts[source] += 1
    assert counts == turns.given(400)
    for consumed in (*range(0, 400, 7), start, start + 1):
        given = turns.given(consumed)
        assert sum(given) == consumed
        for rank, source in enumerate(heaviest_first):
            bound = 1 + sum(Fraction(1, n) for n in range(1, rank + 1))
            assert abs(given[source] - consumed * exact[source]) < bound


@given(weights=st.lists(st.integers(1, 40), min_size=1, max_size=6), start=st.integers(0, 10**12))
@settings(max_examples=40, deadline=None)
def test_any_round_of_turns_has_exactly_the_weights(weights: list[int], start: int) -> None:
    turns = Turns(weights, seed=5)
    sources, _ = turns.at(start + np.arange(sum(weights), dtype=np.int64))
    assert np.bincount(sources, minlength=len(weights)).tolist() == weights


@given(weights=WEIGHTS, counters=st.lists(st.integers(0, 2**40), min_size=1, max_size=20))
@settings(max_examples=40, deadline=None)
def test_any_turn_is_computed_alone(weights: list[float], counters: list[int]) -> None:
    turns = Turns(weights, seed=1)
    sources, places = turns.at(np.array(counters, dtype=np.int64))
    for counter, source, place in zip(counters, sources.tolist(), places.tolist(), strict=True):
        before, after = turns.given(counter), turns.given(counter + 1)
        assert place == before[source]
        assert [b - a for a, b in zip(before, after, strict=True)] == [
            int(source == other) for other in range(len(weights))
        ]


def test_turns_are_fixed_for_good() -> None:
    # A resumed run must find the order it began with: a change here breaks every checkpoint of a mixture.
    assert Turns([5, 3, 2], seed=0).at(np.arange(20, dtype=np.int64))[0].tolist() == [
        2,
        0,
        1,
        0,
        2,
        0,
        1,
        0,
        1,
        0,
        2,
        0,
        1,
        0,
        2,
        0,
        1,
        0,
        1,
        0,
    ]
    assert Turns([1.0], seed=3).at(np.arange(5, dtype=np.int64))[1].tolist() == [0, 1, 2, 3, 4]
    orders = {tuple(Turns([5, 3, 2], seed).at(np.arange(20, dtype=np.int64))[0]) for seed in range(9)}
    assert len(orders) > 4


def test_weights_are_what_was_written() -> None:
    assert Turns([0.1, 0.2, 0.7], seed=0).weights == [1, 2, 7]
    assert Turns([1000, 2000], seed=0).weights == [1, 2]
    with pytest.raises(DataError, match=r"^data.sources: weights 0.333333333333, 1e-06 .*fewer digits$"):
        Turns([0.333333333333, 1e-6], seed=0)


# ---- sources together


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of two sizes, lines, and conversations."""
    place, chance = tmp_path_factory.mktemp("mixture"), random.Random(0)

    def text(words: int) -> str:
        return " ".join(chance.choice(WORDS) for _ in range(words))

    (place / "large.txt").write_text(text(3000))
    (place / "small.jsonl").write_text("".join(json.dumps({"body": text(40)}) + "\n" for _ in range(12)))
    talks = ({"prompt": text(5), "response": text(chance.randint(1, 20))} for _ in range(80))
    (place / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    return place


@pytest.fixture(scope="module")
def mixed(place: Path) -> tuple[Data, tuple[TokenStore, ...]]:
    data = Data(
        sources=(
            Source(path=str(place / "large.txt"), weight=5),
            Source(path=str(place / "small.jsonl"), weight=3, text_field="body"),
            Source(path=str(place / "talks.jsonl"), weight=2, answers_only=True),
        ),
        cache_dir=str(place / "cache"),
        validation_fraction=0.1,
    )
    check_data(data)
    return data, prepare(data, 270, quiet)


@given(
    cuts=st.lists(st.integers(1, 400), min_size=4, max_size=4),
    batches=st.lists(st.integers(1, 97), min_size=4, max_size=4),
)
@settings(max_examples=20, deadline=None)
def test_three_interruptions_leave_no_gap_and_no_repeat(
    mixed: tuple[Data, tuple[TokenStore, ...]], cuts: list[int], batches: list[int]
) -> None:
    data, stores = mixed
    seen: list[int] = []
    for steps, batch in zip(cuts, batches, strict=True):  # each run goes on with another global batch
        mixture = Mixture(stores, data, 16, seed=4)
        for _ in range(max(1, steps // batch)):
            seen += mixture.sample_ids(len(seen), batch).tolist()
    mixture = Mixture(stores, data, 16, seed=4)
    assert seen == mixture.sample_ids(0, len(seen)).tolist()
    for number, samples in enumerate(mixture._samples):  # and each source goes through its own epochs
        first, size = mixture._firsts[number], samples.training_count
        mine = [i for i in seen if first <= i < mixture._firsts[number + 1]]
        assert len(mine) == mixture._turns.given(len(seen))[number]
        for epoch in range(len(mine) // size):
            assert len(set(mine[epoch * size : (epoch + 1) * size])) == size
        assert mixture.passes(len(seen))[number] == len(mine) / size


def test_rows_are_those_of_their_source(mixed: tuple[Data, tuple[TokenStore, ...]]) -> None:
    data, stores = mixed
    mixture = Mixture(stores, data, 16, seed=0)
    ids = mixture.sample_ids(30, 20)
    batch = mixture.batch(ids)
    numbers = np.searchsorted(mixture._firsts, ids, side="right") - 1
    assert np.bincount(numbers).tolist() == [10, 6, 4]
    for row, (number, sample) in enumerate(zip(numbers, ids, strict=True)):
        alone = mixture._samples[number].batch(np.array([sample - mixture._firsts[number]]))
        for name in ("tokens", "labels", "documents"):
            assert torch.equal(getattr(batch, name)[row], getattr(alone, name)[0])
            assert getattr(batch, name).dtype == getattr(alone, name).dtype


def test_one_source_in_a_list_is_that_source_alone(place: Path) -> None:
    keys: dict[str, Any] = {"cache_dir": str(place / "cache"), "validation_fraction": 0.1}
    path = str(place / "large.txt")
    alone, listed = Data(path=path, **keys), Data(sources=(Source(path=path, weight=0.3),), **keys)
    mixtures = [Mixture(prepare(data, 265, quiet), data, 16, seed=2) for data in (alone, listed)]
    assert mixtures[0].digest() == mixtures[1].digest()
    assert mixtures[0].sample_ids(5, 300).tolist() == mixtures[1].sample_ids(5, 300).tolist()


def test_a_checkpoint_tells_whether_the_mixture_is_the_same(
    mixed: tuple[Data, tuple[TokenStore, ...]],
) -> None:
    data, stores = mixed
    heavier = Data(sources=(*data.sources[:2], Source(path="x", weight=4)), validation_fraction=0.1)
    digests = {
        Mixture(stores, data, 16, seed=0).digest(),
        Mixture(stores, heavier, 16, seed=0).digest(),
        Mixture(stores[::-1], data, 16, seed=0).digest(),
        Mixture(stores, data, 8, seed=0).digest(),
    }
    assert len(digests) == 4


def test_held_out_samples_take_turns_by_weight_and_count_once(
    mixed: tuple[Data, tuple[TokenStore, ...]],
) -> None:
    data, stores = mixed
    mixture = Mixture(stores, data, 16, seed=0)
    few, all_of_them = mixture._held_out(6), mixture._held_out(10**6)
    assert few.tolist() == all_of_them[:6].tolist()
    assert len(all_of_them) == len(set(all_of_them.tolist())) == mixture.validation_count
    assert set(np.searchsorted(mixture._firsts, few, side="right") - 1) == {0, 1, 2}
    assert not set(all_of_them.tolist()) & set(mixture.sample_ids(0, 5000).tolist())
    batches = list(mixture.validation_batches(7, limit=1000))
    assert {batch.tokens.shape for batch in batches} == {(7, 16)}
    assert (
        sum(int((batch.labels != IGNORED).any(dim=1).sum()) for batch in batches) == mixture.validation_count
    )


def test_unigram_entropy_is_that_of_the_mixture(mixed: tuple[Data, tuple[TokenStore, ...]]) -> None:
    data, stores = mixed
    mixture = Mixture(stores, data, 16, seed=0)
    counts = np.zeros(270)
    for weight, samples in zip((5, 3, 2), mixture._samples, strict=True):
        ids = np.unique(samples.sample_ids(0, samples.training_count))
        counts += weight * np.bincount(samples._rows.predicted(ids), minlength=270) / len(ids)
    frequencies = counts[counts > 0] / counts.sum()
    assert mixture.unigram_entropy() == pytest.approx(-(frequencies * np.log(frequencies)).sum(), rel=1e-12)


def test_sources_share_a_tokenizer_trained_on_them_all(mixed: tuple[Data, tuple[TokenStore, ...]]) -> None:
    _, stores = mixed
    assert len({(store.directory / "tokenizer.json").read_text() for store in stores}) == 1
    assert len({store.directory for store in stores}) == 3


def test_weights_change_no_store(mixed: tuple[Data, tuple[TokenStore, ...]], place: Path) -> None:
    data, stores = mixed
    lighter = tuple(
        Source(path=s.path, text_field=s.text_field, answers_only=s.answers_only) for s in data.sources
    )

    def nothing(what: str, done: float) -> None:
        raise AssertionError(f"prepared again: {what}")

    again = prepare(Data(sources=lighter, cache_dir=data.cache_dir), 270, nothing)
    assert [store.directory for store in again] == [store.directory for store in stores]


def test_global_random_states_are_left_alone(mixed: tuple[Data, tuple[TokenStore, ...]]) -> None:
    data, stores = mixed
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    mixture = Mixture(stores, data, 16, seed=0)
    mixture.batch(mixture.sample_ids(3, 10))
    list(mixture.validation_batches(2, 2))
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


@pytest.mark.parametrize("key", ['path = "x"', 'text_field = "x"', "answers_only = true"])
def test_a_mixture_beside_one_source_is_refused(key: str) -> None:
    config = parse(f'[data]\n{key}\nsources = [{{path = "y"}}]')
    with pytest.raises(ConfigError, match=rf"^data.{key.split()[0]} and data.sources: give one of the two"):
        resolve_config(config)


# ---- whole runs


CONFIG = """
[model]
layers = 1
hidden = 16
heads = 2
ffn = 24
vocab = 270
[batch]
global_batch = 6
micro_batch = 3
sequence_length = 16
[precision]
dtype = "float64"
[data]
cache_dir = "cache"
[[data.sources]]
path = "large.txt"
weight = 2
[[data.sources]]
path = "talks.jsonl"
answers_only = true
[machine]
matmul = "highest"
malloc = "default"
peak_flops = 1e9
"""


@pytest.fixture
def train(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    monkeypatch.chdir(place)
    (place / "mix.toml").write_text(CONFIG)

    def run(source: str, *sets: str, resume: bool = False) -> str:
        words = [word for each in sets for word in ("--set", each)]
        assert main(["train", source, *words, *["--resume"] * resume]) == 0
        return capsys.readouterr().out

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for matrices of this size more of them only wait for each other
    yield run
    torch.set_num_threads(threads)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_of_a_mixture_is_the_same_however_it_is_cut(
    place: Path, train: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    constant = ("run.steps=4", "schedule.kind=constant")
    page = train("mix.toml", *constant, "run.dir=whole")
    assert "66.7% of the samples" in page
    assert "33.3% of the samples" in page
    train("mix.toml", *constant, "run.dir=small", "batch.micro_batch=1")  # answers of unequal lengths
    assert losses(place / "small") == pytest.approx(losses(place / "whole"), rel=1e-12)
    train("mix.toml", *constant, "run.dir=cut", "run.steps=2")
    train("cut", "run.steps=4", resume=True)
    assert losses(place / "cut") == losses(place / "whole")
    capsys.readouterr()
    other = 'data.sources=[{path="large.txt", weight=3}, {path="talks.jsonl", answers_only=true}]'
    assert main(["train", "cut", "--resume", "--set", "run.steps=5", "--set", other]) == 2
    refusal = capsys.readouterr().err.strip()
    assert refusal.count("\n") == 0
    assert "data.sources = weights 3, 1: cut/checkpoints/step-4 was trained with weights 2, 1" in refusal
    config = load("cut", [other])
    with pytest.raises(BadInput, match="weights 3, 1"):  # known without the data, so before ranks start
        check_resume(config, Path("cut/checkpoints"), lambda: None)
    elsewhere = load("cut", ["data.cache_dir=elsewhere"])
    assert prepared_digest(elsewhere.data, config.model.vocab, 16, 0) is None
    assert not Path("elsewhere").exists()
