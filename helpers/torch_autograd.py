"""The course's attention as autograd functions and PyTorch operators; `torch_attention` chooses one for a call.

A call with gradients is an `autograd.Function`: `_Plain` if kernels can read the tensors in place, `Attention`
otherwise. If PyTorch traces it, forward and backward are one `torch.library` operator each.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from helpers.attention import calls
from helpers.attention.ladder import BACKWARD
from helpers.attention.ladder.call import BackwardOptions, ForwardOptions, mask_window, softmax_scale_of
from helpers.attention.ladder.kinds import without_gradients
from helpers.attention.run import run
from helpers.torch_tensors import (
    INSTEAD,
    array_of,
    contiguous,
    each_tensor,
    is_traced,
    is_transformed,
    on_arrays,
    tensor_of,
    torch,
)

# ---- plain calls: tensors that kernels can read in place


def is_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return True if kernels can read these in place: on one GPU, or the CPU; not traced, cast or transformed."""
    if not type(q) is type(k) is type(v) is torch.Tensor or is_traced():
        return False
    on_gpu, dtype = q.is_cuda, q.dtype
    return (
        dtype == k.dtype == v.dtype
        and (dtype in _DIFFERENTIABLE or (dtype.itemsize == 1 and on_gpu and not _require_grad(q, k, v)))
        and q.get_device() == k.get_device() == v.get_device()
        and (on_gpu or (q.is_cpu and k.is_cpu and v.is_cpu))
        and not (q.is_neg() or k.is_neg() or v.is_neg())
        and not torch.is_autocast_enabled("cuda" if on_gpu else "cpu")
        and not is_transformed()
    )


_DIFFERENTIABLE = frozenset({torch.float32, torch.float16, torch.bfloat16})


def _require_grad(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    return q.requires_grad or k.requires_grad or v.requires_grad


def attend_plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: ForwardOptions,
    deterministic: bool = False,
    *,
    heads_first: bool = False,
) -> Any:
    """Run a plain call: see `is_plain`. heads_first: q, k, v and the output are (batch, heads, rows, head_dim)."""
    if not torch.is_grad_enabled() or not _require_grad(q, k, v):
        outputs = _run({"q": q, "k": k, "v": v}, options, heads_first)
        return outputs if heads_first else contiguous(outputs)
    mask_and_scale = options.window, options.causal, options.softmax_scale
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    of_forward = ForwardOptions(*mask_and_scale, return_lse=True, stage=options.stage)
    of_gradients = BackwardOptions(*mask_and_scale, deterministic)
    o, lse = _Plain.apply(q, k, v, (of_forward, of_gradients, heads_first))
    return (o, lse) if options.return_lse else o


def _run(tensors: dict[str, torch.Tensor], options: Any, heads_first: bool, *, by_operator: bool = False) -> Any:
    """Run a plain call, whatever autograd knows about its tensors, which have the names of `calls.Attention`."""
    if tensors["q"].is_cuda and not by_operator:
        return run(calls.Attention(tensors, options), without_gradients(heads_first))
    by = _by_operator if by_operator else _through_arrays
    if not heads_first:
        return by(tensors, options)
    outputs = by({name: a.transpose(1, 2) if a.ndim == 4 else a for name, a in tensors.items()}, options)  # lse has 3
    if not isinstance(outputs, tuple):
        return outputs.transpose(1, 2)
    return tuple([a.transpose(1, 2) if a.ndim == 4 else a for a in outputs])


def _through_arrays(tensors: dict[str, torch.Tensor], options: ForwardOptions | BackwardOptions) -> Any:
    """Run a call of tensors on the CPU."""
    outputs = run(calls.Attention({name: array_of(a) for name, a in tensors.items()}, options))
    return tuple(map(tensor_of, outputs)) if isinstance(outputs, tuple) else tensor_of(outputs)


def _by_operator(tensors: dict[str, torch.Tensor], options: BackwardOptions) -> tuple[torch.Tensor, ...]:
    """Compute the gradients of a call by the operator."""
    of_forward = ForwardOptions(options.window, options.causal, options.softmax_scale, return_lse=True)
    inputs = Inputs(*(tensors[name] for name in "qkv"))
    how = Options(of_forward, options.deterministic)
    return _gradients_by_operator(tensors["do"], inputs, tensors["o"], tensors["lse"], how)


@functools.cache
def check_backward(head_dim: int, dtype: torch.dtype) -> None:
    """Raise ValueError if no stage has gradients here: in the forward pass, before a backward pass needs them."""
    name = str(dtype).removeprefix("torch.")
    needs = {"head_dim": calls.whole_chunks(head_dim, dtype.itemsize), "dtype": name, "unpadded": head_dim}
    reasons = {stage.name: stage.why_not(**needs) for stage in BACKWARD.values()}
    if all(reasons.values()):
        raise ValueError("no stage has these gradients: " + "; ".join(f"{a}: {why}" for a, why in reasons.items()))


class _Plain(torch.autograd.Function):
    """Attention of plain tensors (`is_plain`), whose backward is as short as it can be in Python.

    Autograd has a thread of its own for the backward, in which the same lines took twice as long as in the caller's
    on the host of an H200.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        how: tuple[ForwardOptions, BackwardOptions, bool],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the output and lse. how: options of forward and backward, and heads_first of `attend_plain`."""
        options, of_gradients, heads_first = how
        o, lse = _run({"q": q, "k": k, "v": v}, options, heads_first)
        o = o if heads_first else o.contiguous()
        check_backward(o.shape[-1], o.dtype)
        ctx.how = of_gradients, heads_first
        ctx.save_for_backward(q, k, v, o.detach(), lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, _: Any) -> tuple[torch.Tensor | None, ...]:
        """Compute the gradients of q, k and v."""
        if do is None:
            return (None,) * 4
        q, k, v, o, lse = ctx.saved_tensors
        options, heads_first = ctx.how
        if do.stride(-1) != 1 or do.is_neg():  # the gradient of a sum is one number, expanded
            do = do.contiguous().resolve_neg()
        by_operator = torch.is_grad_enabled() or is_traced(do, q, k, v)  # see `_differentiate`
        tensors = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}
        return *_run(tensors, options, heads_first, by_operator=by_operator), None


# ---- all other calls


class Inputs(NamedTuple):
    """The tensors of a call, in the order in which autograd's function and the operators take them.

    q, k, v: (batch, seq, heads, head_dim), or with cu_seqlens (tokens, heads, head_dim). The others may be None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    @classmethod
    def split(cls, given: Sequence[Any]) -> tuple[Inputs, Sequence[Any]]:
        """Split the arguments of autograd or an operator into the inputs and the rest."""
        count = len(cls._fields)
        return cls(*given[:count]), given[count:]

    def given(self) -> dict[str, torch.Tensor]:
        """Return those that there are, by name."""
        return {name: a for name, a in zip(self._fields, self, strict=True) if a is not None}


CONSTANTS = "bias", "alibi_slopes", "sinks"
LONGEST = "max_seqlen_q", "max_seqlen_k"


class Options(NamedTuple):
    """A call but for its tensors: the options of its forward, and what only some calls have.

    longest: max_seqlen_q and max_seqlen_k. functions: those of scores, by name; the operators do not support them.
    """

    forward: ForwardOptions
    deterministic: bool = False
    longest: tuple[int | None, int | None] = (None, None)
    functions: Mapping[str, Any] = {}

    def shared(self) -> dict[str, Any]:
        """Return the keyword arguments that a forward and a backward of helpers.attention have in common."""
        how = self.forward
        named = {"causal": how.causal, "window": how.window, "softmax_scale": how.softmax_scale, **self.functions}
        if self.longest != (None, None):
            named |= zip(LONGEST, self.longest, strict=True)
        return named

    def flat(self) -> tuple[list[int], float | None, list[bool], str | None]:
        """Return (limits, softmax_scale, flags, stage), as the operators take them; see `_SCHEMA`.

        Raises:
            TypeError, ValueError: as for `mask_window` and `softmax_scale_of`.
        """
        how = self.forward
        limits = [*mask_window(how.window, how.causal), *[-1 if most is None else most for most in self.longest]]
        scale = None if how.softmax_scale is None else softmax_scale_of(how.softmax_scale, 1)
        flags = [how.causal, self.deterministic, how.return_lse]
        return limits, scale, flags, None if how.stage is None else str(how.stage)

    @classmethod
    def of_flat(cls, limits: list[int], softmax_scale: float | None, flags: list[bool], stage: Any = None) -> Options:
        """Reverse `flat`."""
        left, right, *longest = limits
        causal, deterministic, keep_lse = flags
        stage = int(stage) if stage and stage.isdecimal() else stage
        forward = ForwardOptions((left, right), causal, softmax_scale, keep_lse, stage=stage)
        return cls(forward, deterministic, tuple([most if most >= 0 else None for most in longest]))


def attend(inputs: Inputs, options: Options, **more: Any) -> Any:
    """Call the forward of helpers.attention that these inputs are for. more: options that `Options` does not have."""
    given = inputs.given()
    call = calls.flash_attention_varlen if "cu_seqlens_q" in given else calls.flash_attention
    how = {"return_lse": options.forward.return_lse, "stage": options.forward.stage, **options.shared()}
    return on_arrays(call, {**given, **how, **more})


def _attend_with_lse(inputs: Inputs, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the output; and lse, float32 (batch, heads, seq) or (heads, tokens), empty where it is not kept."""
    outputs = attend(inputs, options)
    return outputs if options.forward.return_lse else (outputs, inputs.q.new_empty(0, dtype=torch.float32))


def _gradients(
    do: torch.Tensor, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor, options: Options, wrt: Sequence[str] = ()
) -> tuple[torch.Tensor, ...]:
    """Compute (dq, dk, dv, *those of wrt), C-contiguous."""
    given = inputs.given()
    call = calls.flash_attention_varlen_backward if "cu_seqlens_q" in given else calls.flash_attention_backward
    how = {"deterministic": options.deterministic, "wrt": tuple(wrt), **options.shared()}
    return on_arrays(call, {"do": do, **given, "o": o, "lse": lse, **how})


# ---- the operators

# Few arguments, because torch.library's autograd copies the whole schema twice for each, in every call that keeps lse.
# limits: the window's left and right, max_seqlen_q and max_seqlen_k, -1 if not given. flags: causal, deterministic, and
# whether lse is kept for gradients.
_SCHEMA = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, "
    "SymInt[] limits, float? softmax_scale, bool[] flags"
)
_SAVED = "Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse"


def _forward(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, flat = Inputs.split(given)
    return _attend_with_lse(inputs, Options.of_flat(*flat))


def _backward_of(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *given: Any) -> tuple[torch.Tensor, ...]:
    inputs, (limits, scale, flags, *wrt) = Inputs.split((q, k, v, *given))
    return _gradients(do, inputs, o, lse, Options.of_flat(limits, scale, flags), *wrt)


forward_operator = torch.library.custom_op(
    "course::flash_attention",
    _forward,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_SCHEMA}, str? stage) -> (Tensor, Tensor)",
)

_backward = torch.library.custom_op(
    "course::flash_attention_backward",
    _backward_of,
    mutates_args=(),
    schema=f"({_SAVED}, {_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)

_backward_wrt = torch.library.custom_op(
    "course::flash_attention_backward_wrt",
    lambda *given: list(_backward_of(*given)),
    mutates_args=(),
    schema=f"({_SAVED}, {_SCHEMA}, str[] wrt) -> Tensor[]",
)


@forward_operator.register_fake
def _fake_forward(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    (q, *_), (_limits, _scale, (_causal, _deterministic, keep_lse), _stage) = Inputs.split(given)
    shape = (*q.shape[:-3], q.shape[-2], q.shape[-3]) if keep_lse else (0,)
    return q.new_empty(q.shape), q.new_empty(shape, dtype=torch.float32)


@_backward.register_fake
def _fake_backward(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@_backward_wrt.register_fake
def _fake_backward_wrt(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *given: Any) -> list[torch.Tensor]:
    inputs, (*_, wrt) = Inputs.split((q, k, v, *given))
    return [a.new_empty(a.shape) for a in (q, k, v, *(getattr(inputs, name) for name in wrt))]


def _gradients_by_operator(
    do: torch.Tensor, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor, options: Options, wrt: Sequence[str] = ()
) -> tuple[torch.Tensor, ...]:
    """Compute what `_gradients` does, as one operator."""
    (q, k, v, *others), (*flat, _stage) = inputs, options.flat()
    given = do, q, k, v, o, lse, *others, *flat
    return tuple(_backward_wrt(*given, wrt)) if wrt else _backward(*given)


# ---- gradients


def _keep(ctx: Any, inputs: Inputs, options: Options, o: torch.Tensor, lse: torch.Tensor) -> None:
    """Keep what the backward starts from."""
    ctx.options = options
    read_by_functions: list[torch.Tensor] = []  # saved only so that autograd notices changes before the backward pass
    each_tensor(read_by_functions.append, options.functions)
    ctx.save_for_backward(o, lse, *inputs, *read_by_functions)
    ctx.mark_non_differentiable(lse)  # no result of the operator's user
    ctx.set_materialize_grads(False)


def _keep_of_operator(ctx: Any, inputs: Sequence[Any], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Keep what the backward starts from, of the operator's inputs."""
    tensors, flat = Inputs.split(inputs)
    _keep(ctx, tensors, Options.of_flat(*flat), *output)


def _differentiate(ctx: Any, do: torch.Tensor | None, _: Any) -> tuple[torch.Tensor | None, ...]:
    """Compute a gradient for each input of the function or the operator."""
    needed = ctx.needs_input_grad
    if do is None:
        return (None,) * len(needed)
    o, lse, *saved = ctx.saved_tensors
    inputs, _read_by_functions = Inputs.split(saved)
    options = ctx.options
    if not options.forward.return_lse:
        raise RuntimeError("course::flash_attention kept no lse (the third of flags), which gradients start from")
    if options.functions and torch.is_grad_enabled():
        _no_second_derivative(ctx)
    do = do if do.stride(-1) == 1 else do.contiguous()  # the gradient of a sum is one number, expanded
    names = *Inputs._fields, "table"  # the latter of the function alone
    wrt = [name for name, is_needed in zip(names, needed, strict=False) if is_needed and name in (*CONSTANTS, "table")]
    # With create_graph=True the gradients may be differentiated: the operator says what is wrong then. It sees q, k and
    # v as the caller gave them, for the gradients depend on these where do does not.
    by_operator = not options.functions and (torch.is_grad_enabled() or is_traced(do, inputs.q, inputs.k, inputs.v))
    compute = _gradients_by_operator if by_operator else _gradients
    gradients = dict(zip(("q", "k", "v", *wrt), compute(do, inputs, o, lse, options, wrt), strict=True))
    return (*map(gradients.get, names), *(None,) * (len(needed) - len(names)))


def _no_second_derivative(ctx: Any, *gradients: Any) -> None:
    raise NotImplementedError(
        "flash_attention has no second derivatives: its gradients were to be differentiated. " + INSTEAD
    )


class Attention(torch.autograd.Function):
    """Attention without an operator, for calls that are not traced.

    It has no setup_context, with which every call would read forward's signature, longer than the rest takes.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the output and lse, of `Inputs`, the table of `score_mods.relative_bias` or None, and `Options`."""
        inputs, (_table, options) = Inputs.split(given)
        o, lse = _attend_with_lse(inputs, options)
        check_backward(o.shape[-1], o.dtype)
        _keep(ctx, inputs, options, o.detach(), lse)
        return o, lse

    backward = staticmethod(_differentiate)


forward_operator.register_autograd(_differentiate, setup_context=_keep_of_operator)

for operator in (_backward, _backward_wrt):
    operator.register_autograd(_no_second_derivative)
