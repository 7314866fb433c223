"""Ring attention for PyTorch's tensors: two processes, with NCCL on two GPUs or gloo on the CPU engine, against one."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from helpers import device
from helpers.attention import comms, ring

torch = pytest.importorskip("torch", reason="PyTorch is optional, and not installed here")
if device.ON_GPU and torch.cuda.device_count() < 2:
    pytest.skip("two GPUs are needed", allow_module_level=True)

from helpers.examples.ring_gpt import GPT  # noqa: E402
from helpers.torch_attention import flash_attention, flash_attention_varlen  # noqa: E402
from helpers.torch_ring import local_positions, ring_attention  # noqa: E402

SIZE = 2


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def gradients_of_a_model(rank: int) -> dict[str, float]:
    """Compare the gradients of ring_gpt's model with those of one rank with whole sequences."""
    torch.manual_seed(0)
    model, text = GPT(32, 16), torch.randint(32, (2, 17))
    model.loss(text, torch.arange(16), flash_attention).backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.loss(text, local_positions(16).to(text.device)).backward()
    for p in model.parameters():
        torch.distributed.all_reduce(p.grad)
    return {name: relative_error(p.grad, want[name]) for name, p in model.named_parameters()}


def gradients_in_a_half_type(rank: int) -> dict[str, float]:
    """Compare this rank's output, lse and gradients, with grouped heads, without a mask, in a ring's order."""
    torch.manual_seed(1)
    whole = [torch.randn(1, 12, heads, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)]
    do = torch.randn(1, 12, 4, 16, dtype=torch.bfloat16)
    o, lse = flash_attention(*whole, return_lse=True)
    o.backward(do)
    where = local_positions(12, schedule="ring")
    assert where.tolist() == [*range(6 * rank, 6 * rank + 6)]
    parts = [a.detach()[:, where].requires_grad_() for a in whole]
    own_o, own_lse = ring_attention(*parts, return_lse=True, deterministic=True, schedule="ring")
    own_o.backward(do[:, where])
    assert own_o.dtype == parts[0].grad.dtype == torch.bfloat16 and not own_lse.requires_grad
    errors = {
        f"d{name}": relative_error(a.grad, b.grad[:, where]) for name, a, b in zip("qkv", parts, whole, strict=True)
    }
    return errors | {"o": relative_error(own_o, o[:, where]), "lse": relative_error(own_lse, lse[..., where])}


def gradients_of_packed_sequences(rank: int) -> dict[str, float]:
    """Compare the gradients of uneven parts of packed sequences with one rank's."""
    torch.manual_seed(2)
    cu, whole = (0, 5, 13), [torch.randn(1, 13, 2, 16, requires_grad=True) for _ in range(3)]
    do = torch.randn(1, 13, 2, 16)
    o = flash_attention_varlen(*(a[0] for a in whole), *[torch.tensor(cu, dtype=torch.int32)] * 2, causal=True)
    o.backward(do[0])
    where = local_positions(13, uneven=True)
    assert len(where) == 7 - rank
    parts = [a.detach()[:, where].requires_grad_() for a in whole]
    ring_attention(*parts, causal=True, cu_seqlens=cu).backward(do[:, where])
    return {name: relative_error(a.grad, b.grad[:, where]) for name, a, b in zip("qkv", parts, whole, strict=True)}


def what_is_raised(call: Any, *args: Any, **options: Any) -> str:
    try:
        call(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def errors(rank: int) -> dict[str, str]:
    """Collect the errors of calls on this rank, by case; at the end rank 1 is gone."""
    q = torch.randn(1, 4, 2, 16)
    raised = {"other": what_is_raised(ring_attention, q, q, q, softmax_scale=0.5 + rank)}
    odd = q[:, : 4 - rank]
    raised["rows"] = what_is_raised(ring_attention, odd, odd, odd)
    raised["refused"] = what_is_raised(ring_attention, q, q, odd if rank else q)
    raised["group"] = what_is_raised(ring_attention, q, q, q, group=comms.virtual_ranks(2))
    raised["tokens"] = what_is_raised(local_positions, 7)
    join = comms.nccl_of_torch if device.ON_GPU else comms.gloo_of_torch
    ranks, compile_first = join(timeout=2.0), ring._compile_first

    def slowly(*args: Any, **arrays: Any) -> None:
        time.sleep(4.0 * rank)
        compile_first(*args, **arrays)

    ring._compile_first = slowly
    raised["slow"] = what_is_raised(ring_attention, q, q, q, group=ranks)
    if rank == 0:
        raised["gone"] = what_is_raised(ring_attention, q, q, q, group=ranks)
        raised["again"] = what_is_raised(ring_attention, q, q, q, group=ranks)
    else:
        time.sleep(3.0)
    return raised


TRIED = gradients_of_a_model, gradients_in_a_half_type, gradients_of_packed_sequences, errors


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    if device.ON_GPU:
        torch.cuda.set_device(rank)
        torch.set_default_device("cuda")
    backend = "nccl" if device.ON_GPU else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=SIZE)
    results = {each.__name__: each(rank) for each in TRIED}
    torch.save(results, f"{folder}/{rank}")
    if device.ON_GPU:
        os._exit(0)  # NCCL's threads may not end after a rank has given up


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(work, (str(folder),), nprocs=SIZE)
    return [torch.load(folder / str(rank)) for rank in range(SIZE)]


def test_a_model_on_two_ranks_has_the_gradients_of_one(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        found = of_rank["gradients_of_a_model"]
        assert len(found) == 24 and max(found.values()) < 1e-5, found


def test_a_half_type_grouped_heads_and_lse(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        found = of_rank["gradients_in_a_half_type"]
        assert max(found.values()) < 2e-2 and found["lse"] < 1e-5, found


def test_packed_sequences_in_uneven_parts(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        found = of_rank["gradients_of_packed_sequences"]
        assert max(found.values()) < 1e-5, found


def test_each_rank_names_what_differs(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        raised = of_rank["errors"]
        start = "ValueError: the ranks call with different arguments: "
        assert raised["other"] == start + "softmax_scale is 0.5 on rank 0, 1.5 on rank 1"
        assert raised["rows"] == start + (
            "q.shape is (1, 4, 2, 16) on rank 0, (1, 3, 2, 16) on rank 1; "
            "k.shape is (1, 4, 2, 16) on rank 0, (1, 3, 2, 16) on rank 1"
        )


def test_a_rank_that_refuses_tells_the_other(results: list[dict[str, Any]]) -> None:
    other, own = (of_rank["errors"]["refused"] for of_rank in results)
    assert own.startswith("ValueError: q float32") and other == f"RuntimeError: rank 1 has refused this call: {own}"


def test_what_a_rank_refuses_by_itself(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert of_rank["errors"]["group"] == "ValueError: group has 2 ranks in this process; tensors are those of one"
        assert of_rank["errors"]["tokens"].startswith("ValueError: 7 tokens cannot be cut into 4 chunks")
    q = torch.zeros(1, 4, 2, 16)
    with pytest.raises(RuntimeError, match=r"there is no process group: start with torchrun"):
        ring_attention(q, q, q)
    with pytest.raises(TypeError, match="q must be a torch tensor"):
        ring_attention(None, q, q)


def test_a_rank_may_compile_longer_than_the_time_limit_and_no_rank_may_leave(results: list[dict[str, Any]]) -> None:
    first, second = (of_rank["errors"] for of_rank in results)
    assert first["slow"] == second["slow"] == "nothing"
    assert first["gone"].startswith("TimeoutError: rank 0 has waited 2 s for the others")
    assert first["again"] == "RuntimeError: these ranks have been given up: rank 0 has waited 2 s for the others"
