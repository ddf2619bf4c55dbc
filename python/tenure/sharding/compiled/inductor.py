"""Sharded parameters in graphs that inductor compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._functorch import config as autograd
from torch._inductor import config, ir, list_mode_options, lowering
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.virtualized import V

from tenure.errors import InputError
from tenure.sharding.compiled.preparing import OPS, Compiler, Prepare

__all__ = ["compile_with"]

# Reordering within what data flow allows would move gathers and releases away from where they were
# put for the sake of memory that inductor does not know of.
_IN_ORDER = {"reorder_for_peak_memory": False, "reorder_for_compute_comm_overlap": False}
# No graph is taken from a cache: what is inserted is of this process. Kernels may be.
_AFRESH = {"fx_graph_cache": False, "fx_graph_remote_cache": False}


def compile_with(mode: str | None, options: dict[str, Any]) -> Compiler:
    """Inductor with these settings, as a function of module, inputs and what prepares graphs."""
    settings = {**(list_mode_options(mode) if mode else {}), **options}
    if settings.get("triton.cudagraphs", config.triton.cudagraphs):
        raise InputError(
            "CUDA graphs replay fixed addresses, and a gathered parameter is at another one each "
            'time: leave out mode="reduce-overhead" and triton.cudagraphs'
        )

    def compile_both(
        module: fx.GraphModule, inputs: Sequence[Any], prepare: Prepare | None
    ) -> Compiler:
        if prepare is None:
            plain: Any = compile_fx(module, inputs, config_patches=settings)
            return cast(Compiler, plain)
        for op in (OPS.gather, OPS.wait, OPS.release):
            _keep_reads_before(op)

        def compile_inner(inner: fx.GraphModule, given: Sequence[Any], **more: Any) -> Any:
            # A copy: inductor changes the graph that it is given, names included.
            before = fx.Graph()
            before.output(before.graph_copy(inner.graph, {}))
            is_backward = bool(more.get("is_backward", False))
            insert = _Insert(lambda graph: prepare(before, graph, is_backward=is_backward))
            with config.patch(post_grad_custom_post_pass=insert):
                return compile_fx_inner(inner, given, **more)

        with autograd.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False):
            compiled: Any = compile_fx(
                module, inputs, compile_inner, config_patches={**settings, **_IN_ORDER, **_AFRESH}
            )
            return cast(Compiler, compiled)

    return compile_both


class _Insert(CustomGraphPass):
    """After all passes that fuse operators: before them, a read could move past a release."""

    def __init__(self, insert: Callable[[fx.Graph], None]) -> None:
        self._insert = insert

    def __call__(self, graph: fx.Graph) -> None:
        self._insert(graph)
        # Torch up to 2.11 looks at outputs that users see, and gradients that were handed over are
        # no nodes any more.
        end = next(iter(graph.find_nodes(op="output")))
        seen = end.meta.get("user_visible_output_idxs")
        if seen is not None:
            outputs: Any = end.args[0]
            left = [at for at in seen if outputs[at] is not None]
            end.meta["user_visible_output_idxs"] = type(seen)(left)

    def uuid(self) -> None:
        """None: not to be cached."""


def _keep_reads_before(op: torch._ops.OpOverload[..., Any]) -> None:
    """Has pointwise reads of a tensor done before an operator that writes to it.

    Inductor computes them where they are used. For an operator that it has no code for it settles
    those that are open only once the operator has its place, so they would come after it (torch
    2.13, `FallbackKernel` and `MutationOutput` in `torch/_inductor/ir.py`).
    """
    if op in lowering.lowerings:
        return
    make: Any = lowering.fallback_handler  # which has no types
    call = make(op, add_to_fallback_set=False)

    def lower(parameters: list[ir.TensorBox], model: int, unit: int) -> Any:
        for parameter in parameters:
            V.graph.mark_buffer_mutated(parameter.get_name())
        return call(parameters, model, unit)

    lowering.register_lowering(op, type_promotion_kind=None)(lower)
