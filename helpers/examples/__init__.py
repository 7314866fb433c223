"""Example programs that use the library as another project would."""
