"""What is wrong in a config file or an override, each with the words that its refusal must have; and how to write such
cases (`Case`). More, of other kinds: test_bad_input.py."""

from __future__ import annotations

from dataclasses import dataclass, field

BASE = """
[model]
layers = 4
hidden = 64
heads = 8
kv_heads = 4
ffn = 96
vocab = 300
[data]
path = "text"
"""
HUGE = 10**30


@dataclass(frozen=True)
class Case:
    """A command in a directory that holds `files`, and words that its one line must have."""

    name: str
    words: tuple[str, ...]
    says: tuple[str, ...]
    files: dict[str, str | bytes] = field(default_factory=dict)


def file(name: str, content: str | bytes, *says: str) -> Case:
    """A config file that is wrong in itself."""
    return Case(name, ("config", "check", "a.toml"), says, {"a.toml": content})


def keys(name: str, sets: str | tuple[str, ...], *says: str) -> Case:
    """Overrides of a good config."""
    given = (sets,) if isinstance(sets, str) else sets
    words = [word for each in given for word in ("--set", each)]
    return Case(name, ("config", "check", "a.toml", *words), says, {"a.toml": BASE})


def train(name: str, sets: str | tuple[str, ...], *says: str, **files: str | bytes) -> Case:
    """The same through `fivefold train`, beside a text and further files."""
    case = keys(name, sets, *says)
    return Case(name, ("train", *case.words[2:]), says, {**case.files, "text": "some text\n", **files})


def words(name: str, *given: str, says: tuple[str, ...]) -> Case:
    return Case(name, given, says, {"a.toml": BASE, "text": "some text\n"})


def layouts(name: str, text: str, says: tuple[str, ...]) -> Case:
    """A file of layouts."""
    given = ("verify", "a.toml", "--layouts", "l.json")
    return Case(name, given, says, {"a.toml": BASE, "l.json": text})


FILES = [
    file("not TOML", "[model]\nhello\n", "a.toml:2:", "not TOML", "Expected '='"),
    file("binary", b"\x7fELF\x00\xff\xfe", "a.toml", "not a text file", "TOML in UTF-8"),
    file("deep nesting", "x = " + "[" * 5000, "a.toml:1:", "not TOML"),
    file("a number of 5000 digits", "[run]\nsteps = " + "9" * 5000, "a.toml:", "not TOML"),
    file("duplicate key", "[model]\nlayers = 2\nlayers = 3\n", "a.toml:3:", "not TOML", "overwrite"),
    file("duplicate section", "[run]\nsteps = 1\n[run]\n", "a.toml:3:", "not TOML"),
    file("unknown section", "\n[modle]\nlayers = 2", "a.toml:2: modle: unknown key", 'did you mean "model"?'),
    file("unknown key", "[model]\nlayerz = 2", "a.toml:2: model.layerz: unknown", 'did you mean "layers"?'),
    file("unknown key below", "[model.experts]\ntopk = 2", "a.toml:2: model.experts.topk", '"top_k"?'),
    file("nothing like it", "[run]\nqqqq = 2", "a.toml:2: run.qqqq", "known: dir, eval_batches"),
    file("key of another section", "[model]\nsteps = 2", "a.toml:2: model.steps", '"run.steps"?'),
    file("key of two sections", "[run]\nevery = 2", '"checkpoint.every" or "log.every"?'),
    file("key outside of sections", "lr = 2", "a.toml:1: lr: unknown key", '"optimizer.lr"?'),
    file("section as a value", "model = 3", "a.toml:1: model: a section, not a value", "model.preset"),
    file("section as a list", "[[model]]\nlayers = 3", "a.toml:1: model: a section, not a value"),
    file("value as a section", "[model.layers]\nx = 1", "a.toml:1: model.layers = {…}", "a whole number ≥ 1"),
    file("wrong type", '[model]\nlayers = "4"', 'a.toml:2: model.layers = "4"', "a whole number ≥ 1"),
    file("fraction for a count", "[run]\nsteps = 1e3", "a.toml:2: run.steps = 1000.0", "a whole number"),
    file("truth for a count", "[run]\nsteps = true", "a.toml:2: run.steps = true", "a whole number"),
    file("count for truth", "[model]\ntied = 1", "a.toml:2: model.tied = 1", "true or false"),
    file("date for text", "[run]\nname = 2026-01-01", "a.toml:2: run.name", "expected text"),
    file("too small", "[model]\nlayers = 0", "a.toml:2: model.layers = 0", "≥ 1"),
    file("too large", "[optimizer]\nmomentum = 1.0", "a.toml:2: optimizer.momentum", "≥ 0.0 and < 1.0"),
    file("negative size", "[model]\nhidden = -64", "a.toml:2: model.hidden = -64", "≥ 1"),
    file("huge", f"[model]\nhidden = {HUGE}", f"a.toml:2: model.hidden = {HUGE}", "64 bits"),
    file("huge seed", f"[run]\nseed = {HUGE}", "a.toml:2: run.seed", "64 bits"),
    file("more layers than can be listed", f"[model]\nlayers = {2**62}", "model.layers", "≤ 10000"),
    file("infinite", "[optimizer]\nlr = inf", "a.toml:2: optimizer.lr = Infinity", "a finite number"),
    file("overflowing", "[optimizer]\nlr = 1e400", "a.toml:2: optimizer.lr", "a finite number"),
    file("not a number", "[model]\ninit_std = nan", "a.toml:2: model.init_std = NaN", "a finite number"),
    file("infinite in a list", "[optimizer]\nbetas = [0.9, nan]", "a.toml:2: optimizer.betas", "finite"),
    file("endless timeout", "[run]\ntimeout_seconds = 1e300", "run.timeout_seconds = 1e+300", "≤ 1"),
    file("betas above 1", "[optimizer]\nbetas = [0.9, 1.5]", "a.toml:2: optimizer.betas", "< 1.0"),
    file("betas below 0", "[optimizer]\nbetas = [-0.1, 0.9]", "a.toml:2: optimizer.betas", "≥ 0.0"),
    file("a list over lines", "[optimizer]\nbetas = [\n0.9,\n2.0]", "a.toml:2: optimizer.betas", "< 1.0"),
    file(
        "no weight",
        '[[data.sources]]\npath = "x"\nweight = 0',
        "a.toml:1: data.sources = ",
        "weight: a number > 0",
    ),
    file(
        "key of a source", '[[data.sources]]\npth = "x"', "a.toml:1: data.sources = ", "list of tables (path:"
    ),
    file(
        "path of a source",
        '[[data.sources]]\npath = "a\\u0001"',
        "a.toml:1: data.sources",
        "control characters",
    ),
    file("one beta", "[optimizer]\nbetas = [0.9]", "a.toml:2: optimizer.betas = [0.9]", "a list of 2"),
    file("no such word", '[parallel]\nschedule = "2f2b"', "a.toml:2: parallel.schedule", '"1f1b"', '"zbv"'),
    file("no such role", '[optimizer]\nno_decay = ["nrom"]', "a.toml:2: optimizer.no_decay", '"norm"'),
    file("empty data path", '[data]\npath = ""', 'a.toml:2: data.path = ""', "not empty"),
    file("empty cache", '[data]\ncache_dir = ""', 'a.toml:2: data.cache_dir = ""', "not empty"),
    file("Unicode section", '["modèl"]\nlayers = 2', "a.toml:1: modèl: unknown key", 'did you mean "model"?'),
    file("Unicode key", '[model]\n"läyers" = 2', "a.toml:2: model.läyers", 'did you mean "layers"?'),
    file("dotted name in quotes", '"model.layers" = 2', 'a.toml:1: "model.layers": unknown', '"model"?'),
    file("empty name", '"" = 2', 'a.toml:1: "": unknown key', "known: batch"),
    file("control character", '[run]\nname = "a\\nb"', r'a.toml:2: run.name = "a\nb"', "control characters"),
    file("run name that leads elsewhere", '[run]\nname = "../x"', "a.toml:2: run.name", "without a slash"),
    file("dotted key", "model.layers = 0", "a.toml:1: model.layers = 0", "≥ 1"),
    file("inline table", "[run]\n[model]\nrope_scaling = { factor = 0.5 }", "a.toml:3: model.rope_scaling."),
    file("quoted names", '[ "model" ]\n"layers" = 0', "a.toml:2: model.layers = 0", "≥ 1"),
    file(
        "lines of a list are no keys",
        '[log]\nsinks = [\n"tensorboard",\n]\n[run]\nsteps = 0',
        "a.toml:6: run.steps = 0",
    ),
    file("Windows line ends and mark", "\ufeff[run]\r\nseed = 1\r\nsteps = 0\r\n", "a.toml:3: run.steps"),
    file("unknown model preset", '[model]\npreset = "llama-900b"', 'a.toml:2: model.preset = "llama-900b"'),
]
OVERRIDES = [
    keys("no value", "run.steps", "--set run.steps: expected section.key=value", '"run.steps=10"'),
    keys("no section", "steps=3", "--set steps=3: expected section.key=value"),
    keys("nothing", "", "--set : expected section.key=value"),
    keys("no name", "=3", "--set =3: expected section.key=value"),
    keys("empty part", "run..steps=3", "--set run..steps=3: expected section.key=value"),
    keys("empty value", "run.steps=", '--set run.steps=: run.steps = ""', "a whole number ≥ 1"),
    keys("unknown section", "runn.steps=3", "--set runn.steps=3: runn: unknown key", 'did you mean "run"?'),
    keys("unknown key", "run.stepz=3", "--set run.stepz=3: run.stepz: unknown", 'did you mean "steps"?'),
    keys("unknown section below", "model.expert.count=3", "--set model.expert.count=3:", '"experts"?'),
    keys("key below a key", "run.steps.x=3", "--set run.steps.x=3: run.steps = {…}", "a whole number"),
    keys("section as a value", "model.experts=3", "--set model.experts=3: model.experts: a section"),
    keys("two lines", "run.steps=1\nrun.seed=2", r"--set run.steps=1\nrun.seed=2: run.steps", "control"),
    keys("unfinished list", "run.steps=[1", '--set run.steps=[1: run.steps = "[1"', "a whole number"),
    keys("text for a list", "log.sinks=wandb", "--set log.sinks=wandb:", 'a list, each one of "tensorboard"'),
    keys("undecodable", "data.path=\udcff", "data.path", "UTF-8"),
    keys("the last one counts", ("run.steps=0", "run.steps=-1"), "--set run.steps=-1: run.steps = -1"),
    keys("very long", "run.name=/" + "x" * 5000, "--set run.name=/xxx", "…", "without a slash"),
]
