"""Where the installed package keeps what other programs need of it."""

from pathlib import Path

cmake_prefix_path: str = str(Path(__file__).parent)
"""The folder to give CMake as `CMAKE_PREFIX_PATH` so that `find_package(Tenure)` finds this one."""
