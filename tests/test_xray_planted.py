"""Each kernel of tests/planted has one bug, which the X-ray names with its lines; without the bug it is clean."""

from __future__ import annotations

import pytest
from hopper_tiles import refused_by_ptxas
from planted_files import FILES, TOPICS, Planted, options, planted, source

from helpers.engine import compiler, nvrtc
from helpers.xray import Finding


@pytest.fixture(autouse=True)
def _only_what_the_compiler_can(request: pytest.FixtureRequest) -> None:
    file = getattr(request.node, "callspec", None) and request.node.callspec.params.get("file")
    if file and file.topic == "unset_variables" and not compiler.filling("pattern"):
        pytest.skip("this compiler cannot fill local variables")
    if file and file.name == "sums_scaled_in_flight" and compiler._is_clang():
        pytest.skip("clang tells of no writes to a thread's own array in a loop")


@pytest.mark.parametrize("file", FILES, ids=str)
def test_each_bug_is_found_where_it_is(file: Planted) -> None:
    file.assert_found(file.look())


@pytest.mark.exhaustive(one_of_each=lambda file: (file.topic, file.finds["kind"]))
@pytest.mark.parametrize("file", FILES, ids=str)
def test_the_fixed_twin_is_clean(file: Planted) -> None:
    file.look(fixed=True).assert_clean()


@pytest.mark.parametrize("topic", TOPICS)
def test_nvrtc_takes_the_kernels(topic: str) -> None:
    """With CuPy's option, by which functions of a host are a device's as well; ptxas warns of no wgmma of a twin."""
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
