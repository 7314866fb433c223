"""Build outside of this folder, which is also a package of the course; pyproject.toml lists what is built."""

import tempfile

from setuptools import setup
from setuptools.command.build_py import build_py


class Modules(build_py):
    """All modules of this folder except this one."""

    def find_package_modules(self, package, package_dir):
        """Return (package, module, file) of each."""
        return [found for found in super().find_package_modules(package, package_dir) if found[1] != "setup"]


with tempfile.TemporaryDirectory() as folder:
    setup(cmdclass={"build_py": Modules}, options={"build": {"build_base": folder}, "egg_info": {"egg_base": folder}})
