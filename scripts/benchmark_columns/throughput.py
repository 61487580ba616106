"""What is written of TFLOP/s a GPU: Table 3 and Fig. 10 of ATP's paper."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.results import Result
from scripts.benchmark_columns.cells import Row, with_source

PAPER_GAINS = {
    "atp-ic1": "37 to 64 %",
    "atp-ic2": "at most about 10 %",
    "atp-ic3": "at most about 10 %",
    "atp-ic4": "4 % for larger models",
}
"""What §5.1 says of ATP over Megatron-LM: the values of Fig. 10 are not printed."""


def chunks(result: Result) -> str:
    """Table 3: what each number of chunks gains, beside the paper's."""
    cells = []
    for interconnect, model, rows in _settings(result, in_table=True):
        own = [row for row in rows if row["contender"] == "ATP"]
        if not all("paper_tflops" in row for row in own):
            continue
        found, paper = ([row[key] for row in own] for key in ("tflops", "paper_tflops"))
        cells.append(
            [
                _short(interconnect),
                model,
                str(tuple(own[0]["mesh"])),
                " / ".join(f"{value:.1f}" for value in found),
                " / ".join(f"{value:.1f}" for value in paper),
                f"{found[0] / paper[0]:.2f}",
                " / ".join(_gain(value, found[0]) for value in found[1:]),
                " / ".join(_gain(value, paper[0]) for value in paper[1:]),
            ]
        )
    heads = (
        "interconnect",
        "model",
        "mesh",
        "TFLOP/s in 1 / 2 / 4 chunks",
        "paper's",
        "of the paper's, 1 chunk",
        "gain of 2 / 4 chunks",
        "paper's",
    )
    return with_source(heads, cells, result)


def contenders(result: Result) -> str:
    """Fig. 10: ATP, Megatron-LM and 2-D tensor parallelism on all GPUs of each interconnect."""
    cells = []
    for interconnect, model, rows in _settings(result, in_table=False):
        by_name = {row["contender"]: row["tflops"] for row in rows}
        own = [row for row in rows if row["contender"] == "ATP"]
        (chosen,) = (row for row in own if row.get("chosen"))
        megatron = by_name["Megatron-LM"]
        cells.append(
            [
                f"{_short(interconnect)}, {rows[0]['devices']} GPUs",
                model,
                f"{megatron:.1f}",
                f"{by_name['2-D']:.1f}",
                f"{chosen['tflops']:.1f}",
                f"{tuple(chosen['mesh'])}, {chosen['chunks']}",
                _gain(own[0]["tflops"], megatron),
                _gain(chosen["tflops"], megatron),
                PAPER_GAINS[interconnect],
            ]
        )
    heads = (
        "interconnect",
        "model",
        "Megatron-LM",
        "2-D",
        "ATP",
        "its mesh, chunks",
        "by the mesh",
        "with chunks",
        "paper",
    )
    return with_source(heads, cells, result)


def _settings(result: Result, in_table: bool) -> Iterator[tuple[str, str, list[Row]]]:
    """The rows of each interconnect and model, on the GPUs of Table 3 or on those of Fig. 10."""
    found: dict[tuple[str, str], dict[int, list[Row]]] = {}
    for row in sorted(result.rows, key=lambda row: (row["interconnect"], row["model"])):
        by_devices = found.setdefault((row["interconnect"], row["model"]), {})
        by_devices.setdefault(row["devices"], []).append(row)
    for (interconnect, model), by_devices in found.items():
        yield interconnect, model, by_devices[(min if in_table else max)(by_devices)]


def _gain(value: float, over: float) -> str:
    return f"{value / over - 1:+.0%}"


def _short(preset: str) -> str:
    return preset.removeprefix("atp-").upper()
