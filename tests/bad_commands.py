"""Bad input to each command, beyond a wrong config."""

from bad_input import HUGE, Case, layouts, words

COMMANDS = [
    words("unknown command", "trian", says=('"trian": unknown command', 'did you mean "train"?')),
    words(
        "no command at all like it",
        "--frobnicate",
        says=("unknown command", "comm, config, convert, doctor"),
    ),
    words("empty command", "", says=('"": unknown command',)),
    words("no config", "train", says=("train: ", "required: CONFIG", "fivefold train --help")),
    words("no action", "config", says=("config: ", "required: ACTION")),
    words("unknown action", "config", "chek", "a.toml", says=("'chek'", "'check'")),
    words("unknown option", "train", "a.toml", "--fast", says=("train: ", "--fast")),
    words("no such file", "config", "check", "quickstrat", says=('"quickstrat": no such', '"quickstart"?')),
    words("empty config", "config", "check", "", says=('"": no such file', "known:")),
    words("path that cannot be one", "config", "check", "x" * 5000, says=("no such file", "known:")),
    words("path with NUL", "config", "check", "a\0b", says=(r"a\x00b", "no such file")),
    words("not a run directory", "config", "check", ".", says=(".: a directory without config.toml",)),
    words("negative ranks", "config", "check", "a.toml", "--ranks", "-3", says=("--ranks", '"-3"', "≥ 0")),
    words(
        "ranks that are no number", "config", "check", "a.toml", "--ranks", "two", says=("--ranks", '"two"')
    ),
    words("explain what is not", "config", "explain", "parallel.zer", says=('"parallel.zer"', '"zero"?')),
    words("explain a bare key", "config", "explain", "lr", says=('"lr"', 'did you mean "optimizer.lr"?')),
    words("explain nonsense", "config", "explain", "a.b.c", says=('"a.b.c"', "known: batch")),
    words("nothing to resume", "train", "a.toml", "--resume", says=("runs/a: no run to resume", "--resume")),
    words(
        "nothing to resume there",
        *("train", "a.toml", "--resume", "--set", "run.dir=here"),
        says=("here: no run to resume", "config.toml"),
    ),
    words("convert to nowhere", "convert", "a", says=("convert: ", "required: OUT")),
    words("convert from no run", "convert", "nowhere", "out", says=("nowhere: not a run directory",)),
    words("convert onto something", "convert", "nowhere", "text", says=("text: is there already",)),
    words("generate from nothing", "generate", says=("required: RUN",)),
    words("generate from no run", "generate", "nowhere", says=("nowhere: not a run", "train printed")),
    Case(
        "generate from a Hugging Face model",
        ("generate", "."),
        (".: a Hugging Face model", "fivefold convert . RUN"),
        {"config.json": "{}"},
    ),
    words("negative tokens", "generate", "x", "--tokens", "-1", says=("--tokens", '"-1"', "≥ 0")),
    words("negative top-k", "generate", "x", "--top-k", "-1", says=("--top-k", '"-1"', "≥ 0")),
    words("negative temperature", "generate", "x", "--temperature", "-0.5", says=("--temperature", "≥ 0")),
    words("temperature nan", "generate", "x", "--temperature", "nan", says=("--temperature", "a finite")),
    Case(
        "prompt that is no text",
        ("generate", "old", "--prompt", "\udcff"),
        ("--prompt: not UTF-8",),
        {"old/config.toml": ""},
    ),
    words("huge seed", "generate", "x", "--seed", str(HUGE), says=("--seed", "64 bits")),
]
VERIFY = [
    words(
        "verify on ranks that are no number",
        "verify",
        "a.toml",
        "--ranks",
        "x",
        says=("--ranks", '"x"', "≥ 0"),
    ),
    words(
        "verify on ranks that the layout has not",
        *("verify", "a.toml", "--set", "parallel.tp=2", "--set", "parallel.dp_shard=1", "--ranks", "3"),
        says=("tp 2", "= 2 ranks", "3"),
    ),
    words(
        "verify of what is approximate",
        *("verify", "a.toml", "--set", "parallel.compression=int8", "--set", "parallel.dp_replicate=2"),
        says=("parallel.compression = int8", "none"),
    ),
    words(
        "verify on more ranks than can be laid out",
        *("verify", "a.toml", "--layouts", "pairs", "--ranks", "1000003"),
        says=("--ranks 1000003", "at most"),
    ),
    words(
        "layouts from nowhere",
        "verify",
        "a.toml",
        "--layouts",
        "some",
        says=("--layouts some", "all, pairs or a"),
    ),
    layouts(
        "layouts that are no JSON", "tp = 2", says=("--layouts l.json", "JSON list of [parallel] tables")
    ),
    layouts(
        "layouts that are no list", '{"tp": 2}', says=("--layouts l.json", "JSON list of [parallel] tables")
    ),
    layouts("no layouts", "[]", says=("--layouts l.json", "empty list", "at least one")),
    layouts("layout with a key that is not", '[{"tpp": 2}]', says=("--layouts l.json", "tpp", "[parallel]")),
    layouts("layout with a word for a degree", '[{"tp": "two"}]', says=("--layouts l.json", "[0].tp")),
    layouts(
        "layout that is illegal",
        '[{"dp_shard": 1}, {"tp": 3}]',
        says=("l.json[1]", "tp = 3", "legal: 2 or 4"),
    ),
    layouts("layout that is open", '[{"tp": -1, "dp_shard": -1}]', says=("l.json[0]", "only one")),
    layouts("layout out of range", '[{"tp": 99999999999}]', says=("--layouts l.json", "tp")),
    words(
        "verdicts into nowhere",
        "verify",
        "a.toml",
        "--save",
        "no/where",
        says=("--save", "no/where", "director"),
    ),
    words("verdicts into a directory", "verify", "a.toml", "--save", ".", says=("--save", '"."', "director")),
]
COMM = [
    words(
        f"{command} into {place}",
        "comm",
        command,
        *given,
        f"--{option}",
        place,
        says=(option, f'"{place}"', "a file"),
    )
    for place in ("no/where", ".")
    for command, given, option in (
        ("bench", (), "html"),
        ("trace", ("ring",), "html"),
        ("calibrate", (), "output"),
    )
]
COMM += [
    words(
        "more ranks than a machine starts",
        "comm",
        "bench",
        "--ranks",
        "100000",
        says=("100000 local ranks", "at most"),
    )
]
