"""The backend of `torch.compile` for sharded models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from tenure.errors import InputError
from tenure.sharding.compiled.preparing import Compiler, Prepare, Preparing
from tenure.sharding.identity import Identity, identity_of
from tenure.sharding.passing import keep_out_of_graphs
from tenure.sharding.sharded import Sharded

__all__ = ["backend"]


def backend(compiler: str = "inductor", *, memory: int | None = None) -> Compiler:
    """A backend of `torch.compile` that gathers and releases sharded parameters in its graphs.

    Every graph is scheduled by an analysis of aliases, and the result is proven apart from it: each
    read of a parameter lies between its gather and its release. A graph that cannot be proven has
    its units gathered all the time it runs, and the reason is logged and in `model.tenure.graphs`.

    Example:
        compiled = torch.compile(model, backend=tenure.sharding.backend("inductor"))

    Args:
        compiler: "inductor", or "aot_eager", which runs the same graphs without compiling them.
        memory: Bytes that the process may use on the model's device (of the host, if that is
            where it is). What the rank that has used most has left when the first graph is
            compiled is the limit for gathering ahead, on all ranks alike. A collective then.

    Raises:
        InputError: There is no such compiler.
    """
    if compiler not in ("inductor", "aot_eager"):
        raise InputError(f'the compiler is "inductor" or "aot_eager", not {compiler!r}')
    if memory is not None and memory <= 0:
        raise InputError(f"memory is a number of bytes, not {memory}")

    keep_out_of_graphs()

    def compile_graph(
        module: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Compiler:
        if compiler == "inductor":
            from tenure.sharding.compiled.inductor import compile_with

            compile_both = compile_with(mode, options or {})
        else:
            compile_both = _uncompiled
        # In the order in which AOTAutograd gives them to the graphs that it makes. Parameters are
        # attributes of the module, as a rule: see identity.py.
        attributes = [*module.parameters(), *module.buffers()]
        given = [*attributes, *inputs]
        parameters = {
            at: identity for at, one in enumerate(given) if (identity := identity_of(one))
        }
        model = _model_of(parameters)
        if model is None:
            plain: Compiler = compile_both(module, inputs, None)
            return plain
        way = next(iter(parameters.values())).model
        shapes = {at: given[at].shape for at in parameters}
        trained = frozenset(at for at in parameters if given[at].requires_grad)
        preparing = Preparing(
            way, parameters, shapes, trained, len(attributes), _limit_of(model, memory)
        )
        return preparing.watched(compile_both(module, inputs, preparing.prepare))

    return compile_graph


def _model_of(parameters: dict[int, Identity]) -> Sharded | None:
    models = {id(model): model for identity in parameters.values() if (model := identity.model())}
    if len(models) > 1:
        raise InputError(
            "one compiled graph uses parameters of several sharded models: compile them apart"
        )
    return next(iter(models.values()), None)


def _limit_of(model: Sharded, memory: int | None) -> int | None:
    given = model.ahead.limit
    if memory is None:
        return given
    left = model.left_beside(memory)
    return left if given is None else min(left, given)


def _uncompiled(module: fx.GraphModule, inputs: Sequence[Any], prepare: Prepare | None) -> Compiler:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func

    def compiler(*, is_backward: bool) -> Compiler:
        def take(inner: fx.GraphModule, _given: Sequence[Any]) -> Any:
            if prepare is not None:
                prepare(inner.graph, inner.graph, is_backward=is_backward)
                inner.recompile()
            return make_boxed_func(inner.forward)

        return take

    both = aot_autograd(
        fw_compiler=compiler(is_backward=False), bw_compiler=compiler(is_backward=True)
    )
    compiled: Compiler = both(module, inputs)
    return compiled
