"""Figures that move, in JupyterLab and on the site: HTML with a few lines of script that need no kernel.

A figure is a function that computes its numbers and returns a `Moving`: the first frame, which needs no script; the
numbers as JSON; and NAME.js, which steps through them. `figure.js` has what the scripts share, `figure.css` the looks.
A script computes no results: what it shows is in the JSON, which the tests compare with NumPy and the engine.
"""

from __future__ import annotations

from helpers.draw.moving.banks import moving_banks as moving_banks
from helpers.draw.moving.figure import Moving as Moving
from helpers.draw.moving.fragments import moving_fragments as moving_fragments
from helpers.draw.moving.launch import moving_launch as moving_launch
from helpers.draw.moving.softmax import moving_softmax as moving_softmax
from helpers.draw.moving.spans import moving_spans as moving_spans
from helpers.draw.moving.tiles import moving_tiles as moving_tiles
