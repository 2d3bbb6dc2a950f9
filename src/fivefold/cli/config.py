"""Show, check and explain configs: `show CONFIG`, `check CONFIG`, `explain KEY`, `presets`, `reference`."""

import argparse
import json

from fivefold.cli.arguments import add_config_arguments, add_debug_argument, add_json_argument, whole_number
from fivefold.config.errors import ConfigError, shortened
from fivefold.config.explain import Entry, entries, hint, sections
from fivefold.config.load import dump, load, preset_names
from fivefold.spec.legal import resolve_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="print a config with every value written out")
    add_config_arguments(show)
    check = actions.add_parser("check", help="say whether a config can run, and what follows from it")
    add_config_arguments(check)
    check.add_argument(
        "--ranks", type=whole_number, default=0, help="check for this many ranks; 0 = what the config says"
    )
    explain = actions.add_parser("explain", help="explain a key or a section")
    explain.add_argument("key", nargs="?", default="", help="e.g. parallel.zero, or parallel; nothing = all")
    add_json_argument(explain)
    add_debug_argument(explain)
    actions.add_parser("presets", help="list model and run presets")
    actions.add_parser("reference", help="print the reference page (docs/reference.md)")


def run(arguments: argparse.Namespace) -> int:
    match arguments.action:
        case "show":
            print(dump(load(arguments.config, arguments.overrides)), end="")
        case "check":
            _check(arguments)
        case "explain":
            _explain(arguments.key, arguments.json)
        case "presets":
            for kind in ("runs", "models", "clusters"):
                print(f"{kind}: {', '.join(preset_names(kind)) or 'none'}")
        case "reference":
            print(reference(), end="")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    resolved = resolve_config(load(arguments.config, arguments.overrides), arguments.ranks)
    mesh = resolved.mesh
    ranks = f" ({mesh.world_size} ranks)" if mesh.world_size > 1 else ""
    print(f"layout: {mesh}{ranks}, zero {resolved.config.parallel.zero}")
    print(f"batch:  {resolved.batch.reason}; {resolved.batch.global_batch_tokens:,} tokens a step")
    if resolved.course.growths:
        print(f"        {resolved.course.reason}")


def _explain(key: str, as_json: bool) -> None:
    found = [item for item in entries() if not key or item.key == key or item.key.startswith(key + ".")]
    if not found:
        raise ConfigError(f'"{shortened(key)}": unknown key; {hint(tuple(key.split(".")))}')
    if as_json:
        rows = [
            {"key": item.key, "type": item.type, "default": item.default, "description": item.description}
            for item in found
        ]
        print(json.dumps(rows, indent=1))
        return
    if key in sections():
        print(sections()[key] + "\n")
    for item in found:
        print(f"{item.key} = {_value(item)}    ({item.type})\n    {item.description}")


def reference() -> str:
    """docs/reference.md: every section and key."""
    lines = ["# Configuration reference", "", "Printed by `fivefold config reference`.", ""]
    for section, text in sections().items():
        own = [item for item in entries() if item.key.rpartition(".")[0] == section]
        lines += [
            f"## [{section}]",
            "",
            text,
            "",
            "| key | default | legal | meaning |",
            "| --- | --- | --- | --- |",
        ]
        for item in own:
            name = item.key.rpartition(".")[2]
            lines.append(f"| `{name}` | `{_value(item)}` | {item.type} | {item.description} |")
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def _value(item: Entry) -> str:
    return json.dumps(list(item.default) if isinstance(item.default, tuple) else item.default)
