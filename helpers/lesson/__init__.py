"""The functions that notebooks call: predictions, pictures, exercises, shortcuts for what was first done by hand."""
