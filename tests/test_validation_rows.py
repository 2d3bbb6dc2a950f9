"""Files of runs that other people write: each row is predicted, or skipped with the column that lacks."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from fivefold.cli.main import main
from fivefold.config.model import Experts, Model
from fivefold.ledger import hardware
from fivefold.ledger.expert import holders_per_token
from fivefold.ledger.job import Job
from fivefold.ledger.physics import Physics
from fivefold.ledger.total import estimate
from fivefold.planner.runs import job_of

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


def predictions(line: str, validated: Callable[[bytes], Any], *changes: dict[str, str]) -> list[float]:
    """Step times of the row whose id begins so, with some cells written over."""
    row = [next(item for item in SHIPPED if item.startswith(line))]
    return [validated(changed(row, **columns))[0]["predicted"] for columns in changes]


def test_tokens_sent_once_a_node_cross_the_network_less(validated: Callable[[bytes], Any]) -> None:
    each, once = predictions(
        "dgxc2505_dsv3_H100", validated, {"overlap_notes": ""}, {"overlap_notes": "DeepEP"}
    )
    assert each > 1.2 * once


def test_deepspeeds_pipeline_waits_for_its_messages() -> None:
    line = next(item for item in SHIPPED if item.startswith("sc21_t1_145"))
    row = dict(zip(HEAD, line.split("\t"), strict=True)) | {"overlap_notes": "DeepSpeed"}
    job = job_of(row, Physics())
    hiding = replace(job, stack=replace(job.stack, overlap_pipeline=True))
    assert estimate(job).time.step > 1.005 * estimate(hiding).time.step


def test_zero_1_within_a_node_takes_less_traffic_between_nodes(validated: Callable[[bytes], Any]) -> None:
    wide, narrow = predictions(
        "internlm7b_1024_z8\t",
        validated,
        {"zero_stage_or_fsdp": "ZeRO-1 over 1024"},
        {"zero_stage_or_fsdp": "ZeRO-1 over 8"},
    )
    assert wide > narrow


def test_an_eager_softmax_passes_over_the_scores_more_often(validated: Callable[[bytes], Any]) -> None:
    eager, compiled = predictions("nanogpt_124m_eager", validated, {}, {"compiled": "yes"})
    assert eager > 1.5 * compiled


@pytest.mark.parametrize(("groups", "chosen"), [(1, 1), (4, 2)])
def test_holders_of_a_tokens_experts(groups: int, chosen: int) -> None:
    """Against every choice there is: 3 of 16 experts, of all groups or of two, dealt over 4 and 8 ranks."""
    experts = Experts(count=16, top_k=3, ffn=8, groups=groups, top_groups=chosen)
    model = Model(layers=2, hidden=8, heads=2, ffn=8, vocab=32, experts=experts)
    job = Job(
        model=model, hardware=hardware.preset("2x8 h100"), micro_batch=1, microbatches=1, sequence_length=8
    )
    each = 16 // groups
    for parts in (4, 8):
        held = [
            len({expert * parts // 16 for expert in choice})
            for pool in combinations(range(groups), chosen)
            for choice in combinations([g * each + i for g in pool for i in range(each)], 3)
        ]
        assert holders_per_token(job, parts) == pytest.approx(sum(held) / len(held), rel=1e-12)


def test_a_batch_that_does_not_divide_is_predicted_in_full(validated: Callable[[bytes], Any]) -> None:
    whole, less = predictions(
        "mosaicgpt112_7b_8g", validated, {"global_batch_seqs": "1120"}, {"global_batch_seqs": "1024"}
    )
    assert less / whole == pytest.approx(1024 / 1120, rel=0.02)
