"""Display parts of a kernel, the diff of two stages, pictures and recorded measurements in a notebook.

    show.code("01_naive.cu", "softmax")            a piece of a kernel, by the name of its section
    show.diff("02_tiled.cu", "03_online_softmax.cu")
    show.grid_picture(n=200, block=64)             a picture; the last value of a cell is displayed

Every function returns an object that Jupyter displays. Texts and diffs are the same in every run. A picture is a PNG
on white, which JupyterLab and the site invert in a dark theme; a moving figure is HTML with a script. The repr of
both is a sentence that says what they show.
"""

# ruff: noqa: F401 - notebooks use these names from here

from __future__ import annotations

from helpers.bench.gpus import side_by_side
from helpers.bench.plots import (
    measured_bars,
    measured_climb,
    measured_climb_times,
    measured_gradients,
    measured_ladder,
    measured_steps,
    moving_tiles,
)
from helpers.bench.reading import (
    climb,
    experiment_times,
    measurements,
    recorded,
    result,
    speedup,
)
from helpers.bench.results import NO_RECORD, RECORD
from helpers.bench.roofline import measured_roofline
from helpers.draw.charts import heatmap, lines, memory_against_n, rescaling, roofline, token_heatmap
from helpers.draw.hopper import roles
from helpers.draw.hopper_backward import (
    Operand,
    budget,
    products,
    roles_of_backward,
    timeline_of_backward,
    two_readings,
)
from helpers.draw.layouts import offsets, operands, owners, warp_tiles
from helpers.draw.moving import moving_banks, moving_fragments, moving_softmax, moving_spans
from helpers.draw.picture import (
    CPU,
    GPU,
    IDLE,
    LINES,
    MOVED,
    PEER,
    READ,
    ROOF,
    STYLE,
    WRITE,
    Html,
    Picture,
    Text,
    bytes_text,
    figure,
    styled,
)
from helpers.draw.sources import code, diff, sections
from helpers.draw.spans import clocks_as_spans, schedules, spans
from helpers.draw.tables import table
from helpers.draw.threads import (
    bank_picture,
    chunk_layout,
    factor_fragment,
    fragments,
    grid_picture,
    ldmatrix_rows,
    matrices,
    sectors,
    warp_picture,
)
from helpers.engine.banks import wavefronts
