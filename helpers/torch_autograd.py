"""The course's attention as autograd's functions and as PyTorch's operators; `torch_attention` chooses one for a call.

A call with gradients is an `autograd.Function`: `_Plain` where kernels can take the tensors as they are, `Attention`
otherwise. Where PyTorch traces it, forward and backward are one `torch.library` operator each.
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

# ---- plain calls: tensors that kernels can take as they are


def is_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return True if kernels can take these as they are: on one GPU, or the CPU; not traced, cast or transformed."""
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
    window, causal, scale, return_lse, *_ = options
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    options = ForwardOptions(window, causal, scale, True, stage=options.stage)
    of_gradients = BackwardOptions(window, causal, scale, deterministic)
    o, lse = _Plain.apply(q, k, v, (options, of_gradients, heads_first))
    return (o, lse) if return_lse else o


def _run(tensors: dict[str, torch.Tensor], options: Any, heads_first: bool, *, by_operator: bool = False) -> Any:
    """Run a plain call, whatever autograd knows of its tensors, which are named as `calls.Attention` names them."""
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
    window, causal, scale, deterministic, *_ = options
    return _backward(*tensors.values(), *(None,) * 5, *Options(causal, window, scale, deterministic, True).flat()[:3])


@functools.cache
def check_backward(head_dim: int, dtype: torch.dtype) -> None:
    """Raise ValueError if no stage has gradients here: in the forward, before a backward is needed."""
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
        """Compute the output and lse. how: options of the forward and the backward; heads_first of `attend_plain`."""
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

CONSTANTS = "bias", "alibi_slopes", "sinks"


class Options(NamedTuple):
    """A call with gradients, or a traced one, but for its tensors.

    longest: max_seqlen_q and max_seqlen_k. functions: those of scores, by their names; the operators take none.
    """

    causal: bool
    window: tuple[int, int] | None
    softmax_scale: float | None
    deterministic: bool
    keep_lse: bool
    stage: str | int | None = None
    longest: tuple[int | None, int | None] = (None, None)
    functions: Mapping[str, Any] | None = None

    def arguments(self, **more: Any) -> dict[str, Any]:
        """Return the keyword arguments for a function of helpers.attention: what all of them take, and `more`."""
        longest = {name: most for name, most in zip(LONGEST, self.longest, strict=True) if most is not None}
        named = {"causal": self.causal, "window": self.window, "softmax_scale": self.softmax_scale}
        return {**named, **longest, **(self.functions or {}), **more}

    def flat(self) -> tuple[Any, ...]:
        """Return (limits, softmax_scale, flags, stage), as the operators take them; see `_SCHEMA`.

        Raises:
            TypeError, ValueError: as `mask_window` and `softmax_scale_of`.
        """
        limits = [*mask_window(self.window, self.causal), *[-1 if most is None else most for most in self.longest]]
        scale = None if self.softmax_scale is None else softmax_scale_of(self.softmax_scale, 1)
        flags = [self.causal, self.deterministic, self.keep_lse]
        return limits, scale, flags, None if self.stage is None else str(self.stage)

    @classmethod
    def of_flat(cls, limits: list[int], softmax_scale: float | None, flags: list[bool], stage: Any = None) -> Options:
        """Reverse `flat`."""
        window, longest = tuple(limits[:2]), tuple([most if most >= 0 else None for most in limits[2:]])
        stage = int(stage) if stage and stage.isdecimal() else stage
        return cls(flags[0], window, softmax_scale, flags[1], flags[2], stage, longest)


LONGEST = "max_seqlen_q", "max_seqlen_k"


def _attend(qkv: Sequence[torch.Tensor], rest: _Tensors, options: Options) -> Any:
    """Compute the output; and lse, float32 (batch, heads, seq) or (heads, tokens), empty where it is not kept.

    qkv: (batch, seq, heads, head_dim), or with cu_seqlens (tokens, heads, head_dim). rest: cu_seqlens_q, cu_seqlens_k
    and those of `CONSTANTS`, None where they are not given.
    """
    cu_seqlens, named = _packed_and_named(rest)
    call = calls.flash_attention_varlen if cu_seqlens else calls.flash_attention
    named |= options.arguments(return_lse=options.keep_lse, stage=options.stage)
    outputs = on_arrays(call, (*qkv, *cu_seqlens), named)
    return outputs if options.keep_lse else (outputs, qkv[0].new_empty(0, dtype=torch.float32))


def _gradients(
    tensors: tuple[torch.Tensor, ...], rest: _Tensors, options: Options, wrt: Sequence[str] = ()
) -> tuple[torch.Tensor, ...]:
    """Compute (dq, dk, dv, *those of wrt), C-contiguous, of do, q, k, v, o and lse. rest: see `_attend`."""
    cu_seqlens, named = _packed_and_named(rest)
    call = calls.flash_attention_varlen_backward if cu_seqlens else calls.flash_attention_backward
    named |= options.arguments(deterministic=options.deterministic, wrt=tuple(wrt))
    return on_arrays(call, (*tensors, *cu_seqlens), named)


def _packed_and_named(rest: _Tensors) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Return cu_seqlens_q and cu_seqlens_k, or nothing; and the constants that are given, by name."""
    cu_seqlens = () if rest[0] is None else (rest[0], rest[1])
    return cu_seqlens, {name: a for name, a in zip(CONSTANTS, rest[2:], strict=True) if a is not None}


# ---- the operators

# Few arguments: torch.library's autograd copies the whole schema twice for each, at every call that keeps lse.
# limits: the window's left and right, max_seqlen_q and max_seqlen_k, with -1 for what is not given.
# flags: causal, deterministic, and whether lse is kept for gradients.
_SCHEMA = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, "
    "SymInt[] limits, float? softmax_scale, bool[] flags"
)

_Tensors = Sequence[torch.Tensor | None]


forward_operator = torch.library.custom_op(
    "course::flash_attention",
    lambda *given: _attend(given[:3], given[3:8], Options.of_flat(*given[8:])),
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_SCHEMA}, str? stage) -> (Tensor, Tensor)",
)

_backward = torch.library.custom_op(
    "course::flash_attention_backward",
    lambda *given: _gradients(given[:6], given[6:11], Options.of_flat(*given[11:])),
    mutates_args=(),
    schema=f"(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)


@forward_operator.register_fake
def _fake_forward(q: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    keep_lse = given[-2][2]  # of flags
    shape = (*q.shape[:-3], q.shape[-2], q.shape[-3]) if keep_lse else (0,)
    return q.new_empty(q.shape), q.new_empty(shape, dtype=torch.float32)


@_backward.register_fake
def _fake_backward(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_backward_wrt = torch.library.custom_op(
    "course::flash_attention_backward_wrt",
    lambda *given: list(_gradients(given[:6], given[6:11], Options.of_flat(*given[11:-1]), given[-1])),
    mutates_args=(),
    schema=f"(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {_SCHEMA}, str[] wrt) -> Tensor[]",
)


@_backward_wrt.register_fake
def _fake_backward_wrt(*given: Any) -> list[torch.Tensor]:
    return [a.new_empty(a.shape) for a in (*given[1:4], *(given[8 + CONSTANTS.index(name)] for name in given[-1]))]


# ---- gradients


def _keep(ctx: Any, tensors: _Tensors, options: Options, o: torch.Tensor, lse: torch.Tensor) -> None:
    """Keep what the backward starts from. tensors: q, k, v and the rest as `_attend` takes it."""
    ctx.options = options
    read_by_functions: list[torch.Tensor] = []  # saved only so that autograd notices a change before the backward
    each_tensor(read_by_functions.append, options.functions)
    ctx.save_for_backward(*tensors, o, lse, *read_by_functions)
    ctx.mark_non_differentiable(lse)  # no result of the operator's user
    ctx.set_materialize_grads(False)


def _keep_of_operator(ctx: Any, inputs: Sequence[Any], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Keep what the backward starts from, of the operator's inputs."""
    _keep(ctx, inputs[:8], Options.of_flat(*inputs[8:]), *output)


def _differentiate(ctx: Any, do: torch.Tensor | None, _: Any, *, inputs: int = 10) -> tuple[torch.Tensor | None, ...]:
    """Compute a gradient for each input: 10 of the function, 12 of the operator."""
    if do is None:
        return (None,) * inputs
    q, k, v, *rest, o, lse = ctx.saved_tensors[:10]
    options = ctx.options
    if not options.keep_lse:
        raise RuntimeError("course::flash_attention kept no lse (the third of flags), which gradients start from")
    if options.functions and torch.is_grad_enabled():
        _no_second_derivative(ctx)
    do = do if do.stride(-1) == 1 else do.contiguous()  # the gradient of a sum is one number, expanded
    tensors = do, q, k, v, o, lse
    extras = CONSTANTS if inputs == 12 else (*CONSTANTS, "table")  # inputs 5 and following
    wrt = [name for name, needed in zip(extras, ctx.needs_input_grad[5:], strict=False) if needed]
    # With create_graph=True the gradients may be differentiated: the operator says what is wrong then. It sees q, k and
    # v as the caller gave them, for the gradients depend on these where do does not.
    if not options.functions and (torch.is_grad_enabled() or is_traced(do, q, k, v)):
        flat = options.flat()[:3]
        gradients = _backward_wrt(*tensors, *rest, *flat, wrt) if wrt else _backward(*tensors, *rest, *flat)
    else:
        gradients = _gradients(tensors, rest, options, wrt)
    of_extras = dict(zip(wrt, gradients[3:], strict=True))
    return (*gradients[:3], None, None, *map(of_extras.get, extras), *(None,) * (inputs - 5 - len(extras)))


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
        """Compute the output and lse, as `_attend` does."""
        *tensors, options = given
        o, lse = _attend(given[:3], tensors[3:8], options)
        check_backward(o.shape[-1], o.dtype)
        _keep(ctx, tensors[:8], options, o.detach(), lse)
        return o, lse

    backward = staticmethod(_differentiate)


forward_operator.register_autograd(functools.partial(_differentiate, inputs=12), setup_context=_keep_of_operator)

for operator in (_backward, _backward_wrt):
    operator.register_autograd(_no_second_derivative)
