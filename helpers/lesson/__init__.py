"""The functions that notebooks call: predictions, pictures, exercises, shortcuts for what a reader has done by hand."""
