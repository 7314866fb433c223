"""What notebooks call: predictions, pictures, exercises, short names for what a reader has done once by hand."""
