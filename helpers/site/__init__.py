"""The site: the executed notebooks, the kernels and the texts of this repository, as pages that need no installation.

    python3 helpers/course.py book      # into book/html, which git ignores

`build` writes the sources of all pages into book/source and has Sphinx make HTML of them. Nothing is executed but the
kernels with planted bugs, whose messages the page of usual mistakes shows: outputs are those that the notebooks hold.
"""
