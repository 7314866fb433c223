"""What the notebooks, the tests and the command line of the course share."""
