"""Each kernel of tests/planted has one bug, which the X-ray reports with its lines; without the bug it is clean."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hopper_tiles import refused_by_ptxas
from planted_files import FILES, TOPICS, Planted, halves, map_of, module, options, out, planted, source

from helpers import engine
from helpers.engine import compiler, nvrtc
from helpers.xray import Finding, xray

# Found by g++ 11 too, at their lines, as accesses through a pointer: it does not tell which array they overrun.
WITHOUT_A_NAME = ("member_of_a_template", "one_accumulator_too_many", "one_of_several_names")
# Clang 19 does not check a member's index there, and gives the read no line; clang 14 does both.
NOT_BY_CLANG_19 = ("member_of_its_own_struct", "sum_in_shared")
BY_A_POINTER = ("as_a_vector", "by_a_functions_pointer", "of_half_pairs", "one_of_several_names")


@pytest.fixture(autouse=True)
def _only_what_the_compiler_can(request: pytest.FixtureRequest) -> None:
    file = getattr(request.node, "callspec", None) and request.node.callspec.params.get("file")
    if file and file.topic == "unset_variables" and not compiler.filling("pattern"):
        pytest.skip("this compiler cannot fill local variables")
    if file and file.name == "sums_scaled_in_flight" and compiler._is_clang():
        pytest.skip("clang tells of no writes to a thread's own array in a loop")
    if file and file.name in WITHOUT_A_NAME and re.search(r" 11\.\d+\.\d+$", compiler.compiler()[1]):
        pytest.skip("g++ 11 does not tell which array is overrun")
    if file and file.name in NOT_BY_CLANG_19 and re.search(r"clang version (1[5-9]|2\d)\.", compiler.compiler()[1]):
        pytest.skip("clang 19 checks no such index, or gives no line")
    if file and file.name in BY_A_POINTER and compiler._is_clang():
        pytest.skip(
            "clang looks at no access to a thread's own array through a pointer or past the end of a constant loop"
        )


@pytest.mark.parametrize("file", FILES, ids=str)
def test_each_bug_is_found_where_it_is(file: Planted) -> None:
    file.assert_found(file.look())


@pytest.mark.exhaustive(one_of_each=lambda file: (file.topic, file.finds["kind"]))
@pytest.mark.parametrize("file", FILES, ids=str)
def test_the_fixed_twin_is_clean(file: Planted) -> None:
    file.look(fixed=True).assert_clean()


@pytest.mark.parametrize("topic", TOPICS)
def test_nvrtc_takes_the_kernels(topic: str) -> None:
    """With CuPy's option, which makes a host's functions the device's as well; ptxas warns about no twin's wgmma."""
    given = (*options(topic), "--device-as-default-execution-space")
    assert [nvrtc.refusal(source(topic, fixed=fixed), given) for fixed in (False, True)] == ["", ""]
    if topic in ("tma", "wgmma"):
        assert refused_by_ptxas(source(topic, fixed=True)) == ""


def test_there_is_a_file_for_each_kind_of_finding() -> None:
    assert len({file.name for file in FILES}) == len(FILES)
    assert {file.finds["kind"] for file in FILES} == {
        "barrier divergence",
        "deadlock",
        "endless loop",
        "inactive lane",
        "misaligned",
        "never waited for",
        "never written",
        "no proxy fence",
        "no wgmma fence",
        "not waited for",
        "out of bounds",
        "overtaken wait",
        "peer exited",
        "peer not started",
        "race",
        "same value",
        "uninitialised",
        "write to const",
        "wrong byte count",
    }


def test_a_file_and_its_twin() -> None:
    counter = planted("counter")
    assert counter.code(fixed=False).splitlines()[0] == '#line 1 "counter.cu"'
    assert "  if (in[threadIdx.x] > 3) count[0] += 1;  // here // there\n" in counter.code(fixed=False)
    assert "  if (in[threadIdx.x] > 3) atomicAdd(&count[0], 1);\n" in counter.code(fixed=True)
    assert "fix:" not in counter.code(fixed=False) + counter.code(fixed=True)


def test_a_race_elsewhere_hides_no_overtaken_wait() -> None:
    code = source("tma", fixed=False).replace("out[t] = t;", "out[t / 2] = t;")
    kernel = engine.RawModule(code=code, options=options("tma")).get_function("left_by_one_for_all")
    report = xray(kernel, (1,), (160,), (map_of(halves(64, 64), (64, 16)), out(64)), 4096)
    assert {finding.kind for finding in report.findings} == {"race", "overtaken wait"}


def first_finding(name: str) -> Finding:
    return planted(name).look().findings[0]


WHERE = "by block (0,0,0) thread (0,0,0) at"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "no_shared_mem",
            "write of word 0 of dynamic shared memory, which has 0 bytes, as the launch gave no shared_mem, "
            f"{WHERE} no_shared_mem.cu:6",
        ),
        (
            "past_the_constants",
            f"read of word 4 of __constant__ past_weights, which has 16 bytes, {WHERE} past_the_constants.cu:7",
        ),
        ("past_a_variable", "write of word 48 of __device__ table, which has 192 "),
        ("const_cast_of_an_input", f"write of in[0], which the kernel takes as const, {WHERE}"),
        ("write_to_a_constant", "which no kernel may write"),
        ("a_flag_by_two_warps", "; both wrote the same value, so it is the same whichever comes last"),
        ("volatile_tail", "both are volatile, which orders nothing between threads"),
        (
            "half_a_warp_reads_the_other",
            "__shfl_xor_sync reads from lane 16, which is not in its mask 0x0000ffff, so its value is undefined: it "
            f"must not be used, {WHERE} half_a_warp_reads_the_other.cu:7",
        ),
        ("lanes_that_have_left", "reads from lane 20, which takes no part in it"),
        (
            "one_accumulator_too_many",
            f"access of acc[4], which has 4 elements, {WHERE} one_accumulator_too_many.cu:6",
        ),
        (
            "a_sum_from_nothing",
            "the write of out[0] depends on a local variable that nobody has given a value, "
            f"{WHERE} a_sum_from_nothing.cu:7",
        ),
    ],
)
def test_what_the_messages_say(name: str, message: str) -> None:
    if planted(name).topic == "unset_variables" and not compiler.filling("pattern"):
        pytest.skip("this compiler cannot fill local variables")
    assert message in first_finding(name).message


HANGS = {
    "two_rings_in_a_circle": (
        "Warps 0 to 3 at two_rings_in_a_circle.cu:21 wait for mbarrier full, phase 0 (parity 0): all 32 arrivals of a "
        "phase are missing. Nobody has arrived at it since its initialisation. Could still bring it: warp 4, which "
        "waits for mbarrier empty, phase 0 (parity 0) at two_rings_in_a_circle.cu:13.",
        "Warp 4 at two_rings_in_a_circle.cu:13 waits for mbarrier empty, phase 0 (parity 0): all 128 arrivals",
        "They wait for each other in a circle: warps 0 to 3 -> warp 4 -> warps 0 to 3.",
    ),
    "one_warp_returns_early": (
        "32 of the 128 arrivals of a phase are missing. So far it had 96 arrivals by warps 0 to 2 at "
        "one_warp_returns_early.cu:13, in this phase by warps 0 to 2. All who ever arrived at it have done so in this "
        "phase: mbarrier.init counts 128, and 96 came; warp 3 has left the kernel.",
    ),
    "the_producer_forgets_a_tile": (
        "for mbarrier full, phase 2 (parity 0): the one arrival of a phase is missing. So far it had 2 arrivals by "
        "thread 128 at the_producer_forgets_a_tile.cu:15, none of them in this phase. So far 16,384 bytes were sent to "
        "it, by thread 128 at the_producer_forgets_a_tile.cu:16. Nobody can bring it any more: thread 128 has left the "
        "kernel.",
    ),
    "more_bytes_expected_than_sent": (
        "8,192 bytes that expect_tx announced have not been sent. So far it had 1 arrival by thread 0",
        "Could still bring it (those that have arrived before): thread 0, which waits for this itself",
    ),
    "one_arrival_too_few": ("mbarrier.init counts 4, and 3 came.",),
    "count_of_a_named_barrier": (
        "wait for bar.sync 3: 96 of 128 threads have come. Could still bring it: warp 3, which waits for "
        "__syncthreads() at count_of_a_named_barrier.cu:13.",
        "Warp 3 at count_of_a_named_barrier.cu:13 waits for __syncthreads(): it waits for all threads that have not "
        "left the kernel. Could still bring it: warps 0 to 2, which wait for bar.sync 3",
    ),
    "turn_that_nobody_gives": ("They wait for each other in a circle: warps 0 to 3 -> warps 4 to 7 -> warps 0 to 3.",),
    "half_a_shuffle": (
        "Threads 0 to 15 at half_a_shuffle.cu:6 wait for __shfl_xor_sync with mask 0xffffffff: threads 16 to 31 of "
        "that mask have not come. Could still bring it: threads 16 to 31, which wait for __syncthreads()",
    ),
    "a_lane_waits_elsewhere": (
        "thread 0 of that mask has not come. Could still bring it: thread 0, which waits for bar.sync 1",
        "in a circle: thread 0 -> threads 1 to 31 -> thread 0",
    ),
    "three_warps_of_a_warpgroup": (
        "wait for wgmma.wait_group 0: 96 of the warpgroup's 128 threads have come. Could still bring it: warp 3, which "
        "waits for __syncthreads() at three_warps_of_a_warpgroup.cu:10.",
    ),
    "registers_that_nobody_gives": (
        "its threads have 168 registers each, and only 0 more are free, until another warpgroup gives some back by "
        "setmaxnreg.dec. Could still bring it: warps 0 to 3, which wait for __syncthreads()",
    ),
}


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_says_who_waits_for_whom(name: str) -> None:
    report = planted(name).look()
    (found,) = report.findings
    for sentence in HANGS[name]:
        assert sentence in found.explanation, found.explanation
    text = " ".join(str(report).split())
    assert "Who waits for whom:" in text and "Who waits for whom:<br/>" in report._repr_html_()
    assert " ".join(HANGS[name][0].split()) in text


def test_a_plain_launch_that_hangs_says_it_too() -> None:
    file = planted("two_rings_in_a_circle")
    function = module(file.topic, fixed=False).get_function(file.name)
    with pytest.raises(engine.LaunchError) as caught:
        function((1,), (160,), (engine.zeros(128, np.float32),))
    assert HANGS[file.name][-1] in caught.value.waits and "Who waits" not in str(caught.value)
    assert getattr(caught.value, "__notes__", [caught.value.waits]) == [caught.value.waits]


def test_a_plain_access_is_not_said_to_be_volatile() -> None:
    assert "both are" not in first_finding("volatile_beside_plain").message


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("bytes", {3}),  # threads 61, 62 and 63
        ("histogram", range(126, 1000)),
        ("half_a_warp_reads_the_other", {16}),
        ("one_accumulator_too_many", {64}),
    ],
)
def test_findings_are_counted_not_repeated(name: str, counts: set[int] | range) -> None:
    found = first_finding(name)
    assert found.count in counts and str(found).endswith(f"({found.count} times)")


def test_a_race_in_words() -> None:
    (found,) = planted("read_too_early").look().findings
    assert found == Finding(
        kind="race",
        message="write of word 1 of __shared__ s by block (0,0,0) thread (1,0,0) at read_too_early.cu:6 races with "
        "read by block (0,0,0) thread (0,0,0) at read_too_early.cu:8",
        file="read_too_early.cu",
        line=6,
        block=(0, 0, 0),
        thread=(1, 0, 0),
        array="s",
        index=1,
        other_file="read_too_early.cu",
        other_line=8,
        other_block=(0, 0, 0),
        other_thread=(0, 0, 0),
        count=64,
    )
    with pytest.raises(AssertionError, match=r"read_too_early: 1 finding\nrace: "):
        planted("read_too_early").look().assert_clean()
