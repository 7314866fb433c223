"""The site: the executed notebooks, the kernels and the texts of this repository as web pages.

    python3 helpers/course.py book      # into book/html, which git ignores

`build` writes the sources of all pages into book/source and runs Sphinx over them. Nothing is executed except the
kernels with planted bugs, whose messages the page of usual mistakes shows: all outputs are the notebooks' own.
"""
