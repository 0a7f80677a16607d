"""A stand-in for SGLang's compiled kernels: a name can be imported, and raises where it is called.

The one kernel that the CPU path with torch-native attention needs is written in torch.
"""

import sys
import types

import torch

__version__ = "0.0.0"


class _Absent:
    def __init__(self, name: str):
        self.__name__ = name

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"{self.__name__}: this lane has no compiled kernels")

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


class _Module(types.ModuleType):
    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


class _Finder:
    """Any submodule of sgl_kernel."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.startswith("sgl_kernel."):
            from importlib.machinery import ModuleSpec

            return ModuleSpec(name, _Finder, is_package=True)
        return None

    @staticmethod
    def create_module(spec):
        return _Module(spec.name)

    @staticmethod
    def exec_module(module):
        return None


sys.meta_path.append(_Finder)


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, *_):
    """req_to_token[row, start:end] = the next end − start entries of out_cache_loc, row after row."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(torch.int32)
        taken += end - start


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(f"sgl_kernel.{name}")
