"""The decoder beside transformers: logits, every gradient, files read and written, training from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from fivefold.cli.main import main
from fivefold.config.huggingface import read_model
from fivefold.config.load import load
from fivefold.config.model import Model
from fivefold.config.tree import Source
from fivefold.data.documents import File
from fivefold.data.tokenizer import train_tokenizer
from fivefold.nn.attention import Segments
from fivefold.nn.decoder import Decoder
from fivefold.nn.hub import weights as hub
from fivefold.nn.hub.weights import open_weights
from fivefold.nn.inputs import Inputs
from fivefold.proof.error import errors
from fivefold.spec.parameters import parameters
from fivefold.trainer.checkpoint import load_tensors
from hub_models import DENSE, EXPERTS, build
from test_decoder import scaled

FAMILIES = DENSE | EXPERTS
ROWS, SEQUENCE = 3, 40


def decoder_of(directory: Path, dtype: torch.dtype) -> Decoder:
    model = read_model(directory)
    decoder = Decoder(model).to(dtype)
    weights = open_weights(directory)
    weights.check(model)
    named = dict(decoder.named_parameters())
    with torch.no_grad():
        for spec in parameters(model):
            named[spec.name].copy_(weights.read(spec))
    return decoder


def exact(theirs: nn.Module, model: Model, patch: pytest.MonkeyPatch) -> None:
    """Replaces what transformers computes in float32 whatever the model's dtype is: norms, rotary tables, softmax."""
    for module in theirs.modules():
        if type(module).__name__.endswith("RMSNorm"):
            patch.setattr(module, "forward", exact_norm(module))
        if type(module).__name__.endswith("RotaryEmbedding"):
            patch.setattr(module, "forward", exact_rotary(model))
        if type(module).__name__.endswith("TopKRouter"):
            patch.setattr(module, "forward", exact_router(module, model))
    softmax = F.softmax
    patch.setattr(
        nn.functional, "softmax", lambda x, dim=None, dtype=None, **rest: softmax(x, dim=dim, **rest)
    )


def exact_norm(module: Any) -> Any:
    return lambda x: F.rms_norm(x, module.weight.shape, module.weight, module.variance_epsilon)


def exact_router(module: Any, model: Model) -> Any:
    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x.flatten(0, -2) @ module.weight.T
        weights, chosen = torch.softmax(logits, dim=-1).topk(model.experts.top_k, dim=-1)
        if model.experts.normalize_top_k:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights, chosen

    return forward


def exact_rotary(model: Model) -> Any:
    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        plain = [model.rope_theta ** (-2 * i / model.head_dim) for i in range(model.head_dim // 2)]
        if model.rope_scaling:
            plain = [scaled(each, model.rope_scaling) for each in plain]
        angles = position_ids[..., None].to(x.dtype) * torch.tensor(plain, dtype=x.dtype)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    return forward


def batch(vocab: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(vocab, (ROWS, SEQUENCE), generator=generator)
    labels = torch.randint(vocab, (ROWS, SEQUENCE), generator=generator)
    labels[0, 7:] = -100
    return tokens, labels


def parity(
    name: str, directory: Path, dtype: torch.dtype, patch: pytest.MonkeyPatch | None
) -> dict[str, float]:
    """Errors of the logits, and of the gradient of each tensor as transformers stores it."""
    theirs = build(FAMILIES[name], dtype)
    theirs.save_pretrained(directory)
    ours = decoder_of(directory, dtype)
    if patch:
        exact(theirs, ours.model, patch)
    tokens, labels = batch(ours.model.vocab)
    segments = Segments.from_documents(torch.zeros_like(tokens))
    logits = theirs(tokens, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum").backward()
    found = errors({"logits": ours(Inputs(tokens, segments))}, {"logits": logits})
    ours(Inputs(tokens, segments, labels)).backward()
    return found | errors(stored_gradients(directory, ours), split_experts(theirs, directory))


def split_experts(theirs: Any, directory: Path) -> dict[str, Tensor]:
    """The gradients by the names of the file: transformers keeps all experts in one tensor, its files do not."""
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    target = directory / "theirs"
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(gradients[name])
    theirs.save_pretrained(target)
    return load_file(target / hub.SINGLE)


def stored_gradients(directory: Path, decoder: Decoder) -> dict[str, Tensor]:
    """The gradients, written and read as weights are."""
    model_type = json.loads((directory / "config.json").read_text())["model_type"]
    gradients = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    target = directory / "gradients"
    target.mkdir()
    hub.write_weights(target, model_type, decoder.model, gradients)
    return load_file(target / hub.SINGLE)


BOUNDS = {"float32": 1e-5, "float64": 1e-10, "float64 unpatched": 1e-6}


@pytest.mark.parametrize(
    "kind", ["float32", "float64", pytest.param("float64 unpatched", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(
    tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    dtype = torch.float32 if kind == "float32" else torch.float64
    found = parity(name, tmp_path, dtype, monkeypatch if kind == "float64" else None)
    worst = max(found, key=lambda name: found[name])
    record_property("logits", found["logits"])
    record_property("gradient", max(error for key, error in found.items() if key != "logits"))
    assert found[worst] <= BOUNDS[kind], f"{worst}: {found[worst]:.1e}"


def tokenizer_in(directory: Path) -> None:
    text = directory / "text"
    text.write_text("".join(chr(33 + i * 7 % 90) * 2 for i in range(3000)))
    train_tokenizer([File(text, Source(path=str(text)))], 300).save(directory / "tokenizer.json")
    text.unlink()


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("name", FAMILIES)
def test_in_and_out_again_is_bit_equal(
    tmp_path: Path, name: str, sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sharded:
        monkeypatch.setattr(hub, "SHARD_BYTES", 20_000)
    theirs = build(FAMILIES[name])
    theirs.save_pretrained(tmp_path / "in", max_shard_size="20KB" if sharded else "1GB")
    tokenizer_in(tmp_path / "in")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "run")]) == 0
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert type(again) is type(theirs)
    expected = theirs.state_dict()
    assert again.state_dict().keys() == expected.keys()
    for key, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[key]), key
    tokens, _ = batch(300)
    assert torch.equal(
        again.eval()(tokens).logits, theirs.from_pretrained(tmp_path / "in").eval()(tokens).logits
    )
    assert read_model(tmp_path / "out") == read_model(tmp_path / "in")
    backend = Tokenizer.from_file(str(tmp_path / "in" / "tokenizer.json"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("!!((//") == backend.encode("!!((//").ids
    assert tokenizer.eos_token == "<|endoftext|>"
    assert again.config.bos_token_id == again.config.eos_token_id == tokenizer.eos_token_id
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 if sharded else len(files) == 1


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "mixtral"])
def test_training_goes_on_from_published_weights(tmp_path: Path, name: str) -> None:
    """With a learning rate next to nothing the trained model is the published one, on two sharded ranks."""
    hub_directory, run = tmp_path / "hub", tmp_path / "run"
    build(FAMILIES[name]).save_pretrained(hub_directory)
    tokenizer_in(hub_directory)
    (tmp_path / "text").write_text("some text and more of it\n" * 400)
    (tmp_path / "c.toml").write_text(
        f'data = {{ path = "{tmp_path}/text", cache_dir = "{tmp_path}/data", validation_fraction = 0.0 }}\n'
        'parallel = { zero = 3, dp_shard = 2 }\nmachine = { matmul = "highest", malloc = "default" }\n'
        "optimizer = { lr = 1e-12 }\nrun = { steps = 1 }\nbatch = { sequence_length = 16 }\n"
    )
    sets = [f"model.path={hub_directory}", f"run.dir={run}"]
    assert main(["train", str(tmp_path / "c.toml"), *(w for each in sets for w in ("--set", each))]) == 0
    config = load(str(run))
    assert config.data.tokenizer == str(hub_directory / "tokenizer.json")
    assert config.model.path == str(hub_directory)
    found, weights = load_tensors(run / "checkpoints" / "step-1"), open_weights(hub_directory)
    for spec in parameters(config.model):
        assert torch.allclose(found[f"model.{spec.name}"], weights.read(spec), rtol=0, atol=1e-10), spec.name
        assert torch.equal(weights.read(spec, 3, 7), weights.read(spec)[3:7])
    (hub_directory / "config.json").unlink()
    assert load(str(run)) == config  # a run needs the published files no more
    assert main(["generate", str(run), "--prompt", "some", "--tokens", "3"]) == 0


def test_files_of_a_model_without_its_head_and_with_its_buffers(tmp_path: Path) -> None:
    """As GPT-2 is published: no "transformer." in front, and the causal masks."""
    theirs = build(FAMILIES["gpt2"])
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / hub.SINGLE)
    renamed = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    hub.save_file(renamed | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}, tmp_path / hub.SINGLE)
    decoder = decoder_of(tmp_path, torch.float32)
    assert torch.equal(decoder.embedding.weight, theirs.transformer.wte.weight)


def test_wrong_files_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = build(FAMILIES["llama"])

    def refusal(target: str = "out") -> str:
        assert main(["convert", str(tmp_path), str(tmp_path.parent / target)]) == 2
        line = capsys.readouterr().err.strip().splitlines()
        assert len(line) == 1
        return line[0]

    theirs.save_pretrained(tmp_path)
    capsys.readouterr()
    good = load_file(tmp_path / hub.SINGLE)
    name = "model.layers.1.mlp.up_proj.weight"
    for tensors, says in (
        ({k: t for k, t in good.items() if k != name}, f"{name} is missing"),
        (good | {name: good[name][:-1].clone()}, f"{name} is [39, 24], the model has [40, 24]"),
        (good | {"model.extra": torch.ones(1)}, "model.extra belongs to nothing"),
    ):
        hub.save_file(tensors, tmp_path / hub.SINGLE)
        assert says in refusal()
    (tmp_path / hub.SINGLE).write_bytes(b"no tensors")
    assert "not a readable safetensors file" in refusal()
    (tmp_path / hub.SINGLE).unlink()
    assert "no weights (model.safetensors" in refusal()
    (tmp_path / hub.INDEX).write_text("[]")
    assert "not an index" in refusal()
    assert not (tmp_path.parent / "out").exists()
