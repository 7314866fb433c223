"""What the command does once everything is installed."""
