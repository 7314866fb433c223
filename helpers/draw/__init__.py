"""Pictures, listings and tables that a notebook or the site shows."""
