"""Studies: each measures one claim of a notebook, and formats its record."""
