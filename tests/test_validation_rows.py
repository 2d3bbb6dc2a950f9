"""Files of runs that other people write: each row is predicted, or skipped with the column that lacks."""

import json
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from fivefold.cli.main import main

Lines = Callable[[str], tuple[int, Any]]
SHIPPED = (
    (resources.files("fivefold") / "presets" / "validation" / "runs.tsv")
    .read_text(encoding="utf-8")
    .splitlines()
)
HEAD = SHIPPED[0].split("\t")
ROWS = [line for line in SHIPPED[1:] if line.startswith(("korth22_t5_22B", "tt2412_405b", "mbridge_26.02"))][
    :6
]


@pytest.fixture
def validated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[bytes], Any]:
    def run(data: bytes) -> Any:
        path = tmp_path / "runs.tsv"
        path.write_bytes(data)
        code = main(["validate", str(path), "--json"])
        out, err = capsys.readouterr()
        if code == 2:
            assert err.count("\n") == 1
            return err
        found = json.loads(out)["rows"]
        for row in found:
            assert set(row) == {
                "id",
                "source",
                "quantity",
                "predicted",
                "measured",
                "error",
                "in_fitted_range",
                "skipped",
            }
            assert (row["predicted"] is None) == (row["skipped"] is not None)
        return found

    return run


def changed(lines: Sequence[str] = ROWS, **columns: str) -> bytes:
    """The rows with some cells written over; a column of None is left out."""
    cells = [dict(zip(HEAD, line.split("\t"), strict=False)) | columns for line in lines]
    return "\n".join(
        ["\t".join(HEAD), *("\t".join(row.get(name, "") for name in HEAD) for row in cells)]
    ).encode()


PLAIN = "\n".join([SHIPPED[0], *ROWS])


@pytest.mark.parametrize(
    "data",
    [
        PLAIN.replace("\n", "\r\n").encode(),
        b"\xef\xbb\xbf" + PLAIN.encode(),
        "\n".join([SHIPPED[0] + "\tremark", *(row + "\tx\ty" for row in ROWS)]).encode(),
        "\n".join([SHIPPED[0], "", "# a remark", *(row.rstrip("\t") for row in ROWS), ""]).encode(),
    ],
    ids=["CRLF", "BOM", "columns more", "remarks and short lines"],
)
def test_forms_of_a_file(data: bytes, validated: Any) -> None:
    found = [row for row in validated(data) if row["id"] != "# a remark"]
    assert found == validated(PLAIN.encode())
    assert any(row["skipped"] is None for row in found)


@pytest.mark.parametrize(
    "column", ["gpu", "layers", "hidden", "heads", "seq_len", "global_batch_seqs", "ffn_hidden"]
)
def test_a_missing_column_is_named(column: str, validated: Any) -> None:
    lacking = [name for name in HEAD if name != column]
    cells = [dict(zip(HEAD, line.split("\t"), strict=False)) for line in ROWS]
    lines = ["\t".join(lacking), *("\t".join(row.get(name, "") for name in lacking) for row in cells)]
    for found in (validated("\n".join(lines).encode()), validated(changed(**{column: ""}))):
        assert found
        assert all(row["skipped"].startswith("no ") and column in row["skipped"] for row in found)


@pytest.mark.parametrize(
    "column",
    [
        "layers",
        "heads",
        "kv_heads",
        "moe_experts",
        "n_gpus",
        "tp",
        "pp",
        "vpp",
        "ep",
        "dp",
        "micro_batch",
        "params_b",
    ],
)
@pytest.mark.parametrize("value", ["0", "0.5", "-3", "7", "99999999999999999999", "½ ∞"])
def test_odd_numbers_end_in_a_prediction_or_a_reason(column: str, value: str, validated: Any) -> None:
    for row in validated(changed(**{column: value})):
        assert row["skipped"] is None or row["skipped"].startswith(("no ", "parallel.")), row["skipped"]


def test_a_row_without_a_measurement_says_so(validated: Any) -> None:
    columns = ("step_time_s", "derived_step_time_s", "tokens_per_s_per_gpu", "peak_mem_gib")
    found = validated(changed(**dict.fromkeys(columns, "")))
    assert [row["skipped"] for row in found] == [f"no {', '.join(columns)}"] * len(ROWS)


def test_what_is_no_file_of_runs_is_refused(validated: Any) -> None:
    for data in (b"", b"a,b\n1,2\n", b"\xff\xfe\x00", SHIPPED[0].replace("\t", ",").encode()):
        assert "fivefold: " in validated(data)
    assert validated(SHIPPED[0].encode()) == []


def test_a_quote_that_does_not_close_stays_in_its_line(validated: Any) -> None:
    lines = [SHIPPED[0], '"' + ROWS[0], *ROWS[1:]]
    found = validated("\n".join(lines).encode())
    assert [row["predicted"] for row in found] == [row["predicted"] for row in validated(PLAIN.encode())]


def test_expert_traffic_that_a_row_says_is_overlapped_hides_under_products(
    validated: Callable[[bytes], Any],
) -> None:
    experts = [line for line in SHIPPED if line.startswith("dgxc2505_dsv3_H100")]
    plain, dual, megatron = (
        validated(changed(experts, overlap_notes=notes))[0]["predicted"]
        for notes in ("", "DualPipe", "overlap-moe-expert-parallel-comm")
    )
    assert plain > 1.05 * dual
    assert dual == megatron
