"""Compiles the optional CPU ops into the wheel; everything else is in pyproject.toml.

Without a C++ compiler, or where it fails, the wheel has none of them, the ops run in XLA, and a
start says so.
"""

import runpy
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

_built = False


class BuildWithOps(build_py):
    def run(self):
        super().run()
        build = runpy.run_path(str(Path("pallas_kernels/cpu/build.py").resolve()))
        folder = Path("." if self.editable_mode else self.build_lib, "pallas_kernels/cpu")
        try:
            build["built"](folder)
        except build["BuildError"] as error:
            print(f"the CPU ops are left out, XLA runs instead: {error}", file=sys.stderr)
            return
        global _built
        _built = True


class TaggedWheel(bdist_wheel):
    """A wheel with the library is for one platform, but for every Python."""

    def get_tag(self):
        if not _built:
            if self.plat_name_supplied:
                sys.exit("--plat-name asks for a wheel with the CPU ops, which were not compiled")
            return super().get_tag()
        self.root_is_pure = False
        platform = super().get_tag()[2]
        self.root_is_pure = True
        return "py3", "none", platform


setup(cmdclass={"build_py": BuildWithOps, "bdist_wheel": TaggedWheel})
