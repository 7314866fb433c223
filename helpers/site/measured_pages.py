"""The pages "Measured": every recorded measurement in sortable tables, one page for each GPU and each study."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

from helpers.bench import gpus, study
from helpers.site import listing, web_address
from helpers.site.readme_pages import toctree

FOLDER = "measured"
TABLES = {  # heading -> the kinds of measurements below it
    "The output: stages and their peers": ("stage", "peer", "roof"),
    "The gradients": ("backward", "backward peer"),
    "Steps of climbs": ("step", "backward step"),
    "Other tile sizes, other texts": ("variant", "experiment", "backward experiment"),
    "The host's time": ("host",),
}
TITLES = {  # for studies whose names do not say what they measure
    **{"autograd": "Autograd, and FlashAttention-4", "bits": "The same bits every time", "cute": "CuTe", "fp8": "FP8"},
    **{"fused": "Fused rotary embedding and projection", "hopper": "Hopper's kernel, part by part"},
    **{"backward_counters": "Gradients on Hopper, by counters"},
    **{"pipes": "exp2 beside the tensor cores", "presets": "Smaller tiles", "promises": "Long sequences, host times"},
    **{"profile_stages": "GPU counters of each stage", "ring": "Ring attention", "score_mod": "Functions of scores"},
    **{"tf32": "float32 on tensor cores", "torch_model": "PyTorch and a model", "train": "Training a small GPT"},
    **{"xray_vs_ncu": "X-ray and Nsight Compute"},
}
COLUMNS = ("name", "type", "mask", "batch", "heads", "N", "d", "ms", "spread", "TFLOP/s", "max error", "note")


def pages() -> dict[str, str]:
    """Write all pages in Markdown, by path, the list of them first."""
    records, studies = gpus.records(), {name: study.module_of(name) for name in study.STUDIES}
    about = {
        name: re.sub(r"\s+", " ", (module.__doc__ or name).strip().splitlines()[0]) for name, module in studies.items()
    }
    lines = [
        *("# Measured", ""),
        "Every measurement that the course has recorded. A press on a column's name sorts by it; the line above a "
        "table keeps the rows that contain all of its words.",
        *("", "## By GPU", ""),
        *(
            f"- [{name}]({gpus.slug(name)}.md): {len(record['results'])} measurements"
            for name, record in records.items()
        ),
        *(
            "",
            "Another GPU? One command makes its record: [what it needs](/CONTRIBUTING.md#the-record-of-your-gpu).",
            "",
        ),
        *("## By question", "", "Studies: what one claim of a notebook rests on.", ""),
        *(f"- [{_title(name)}](study-{name.replace('_', '-')}.md): {text}" for name, text in about.items()),
        "",
    ]
    written = {f"{FOLDER}/{gpus.slug(name)}.md": _of_gpu(name, record) for name, record in records.items()}
    written |= {
        f"{FOLDER}/study-{name.replace('_', '-')}.md": _of_study(name, about[name], str(module.table()))
        for name, module in studies.items()
    }
    index = "\n".join([*lines, toctree(file.removeprefix(f"{FOLDER}/") for file in written)])
    return {f"{FOLDER}/index.md": index, **written}


def _of_gpu(name: str, record: Mapping[str, Any]) -> str:
    device = record["device"]
    facts = [f"compute capability {device['compute_capability']}", f"{device['multiprocessors']} multiprocessors"]
    labels = (("driver", "driver"), ("cupy", "CuPy"), ("nvrtc", "NVRTC"), ("torch", "PyTorch"))
    facts += [f"{label} {device[key]}" for key, label in labels if key in device]
    file = f"notebooks/{FOLDER}/{gpus.slug(name)}.json"
    source = f" {web_address.link('The record', file)}." if web_address.is_published() else ""
    lines = [
        f"# {name}",
        "",
        f"{', '.join(facts)}. Times are medians; the spread is from the fastest to the slowest.{source}",
        "",
    ]
    for heading, kinds in TABLES.items():
        if results := [result for result in record["results"] if result["kind"] in kinds]:
            lines += [f"## {heading}", "", *_table(results), ""]
    return "\n".join(lines)


def _table(results: list[Mapping[str, Any]]) -> list[str]:
    shown = [_row(result) for result in results]
    kept = [i for i in range(len(COLUMNS)) if any(row[i] for row in shown)]
    rows = ([html.escape(row[i]) for i in kept] for row in shown)
    return listing.table([COLUMNS[i] for i in kept], rows, left=("name", "type", "mask", "note"))


def _row(result: Mapping[str, Any]) -> tuple[str, ...]:
    batch, heads, rows, head_dim = result["shape"] if len(result["shape"]) == 4 else ("", "", "", "")
    words = [f"{result['step']:02}: {result['idea']}"] if result.get("step") is not None else []
    if not head_dim:
        words.append(" × ".join(map(str, result["shape"])))
    words += [result["note"]] * bool(result.get("note"))
    return (
        result["name"],
        result["dtype"],
        "causal" if result["causal"] else "",
        *map(str, (batch, heads, rows, head_dim)),
        f"{result['ms']:.4g}",
        f"{(result['ms_max'] - result['ms_min']) / result['ms']:.1%}",
        f"{result['tflops']:.3g}" if result.get("tflops") else "",
        f"{result['max_error']:.1e}" if result.get("max_error") is not None else "",
        "; ".join(words),
    )


def _of_study(name: str, about: str, table: str) -> str:
    command = (
        f"`python3 -m helpers.bench.study {name}` prints this; with a file's name, on a GPU, it measures it again."
    )
    return "\n".join(
        [
            f"# {_title(name)}",
            "",
            about,
            "",
            command,
            "",
            "````{code-block} text",
            *([":class: columns"] if any(map(_is_wide_row, table.splitlines())) else []),
            "",
            table.strip("\n"),
            "````",
            "",
        ]
    )


def _title(study: str) -> str:
    return TITLES.get(study, study.replace("_", " ").capitalize())


def _is_wide_row(line: str) -> bool:
    """Return True for a row of columns that is too wide for the space next to the sidebar."""
    return len(line) > 125 and len(re.findall(r"\S {2,}\S", line)) >= 3
