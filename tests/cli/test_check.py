"""`flashwright check`: faults of a user's kernels, for continuous integration."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from command_line import flashwright

from flashwright.simulation.source import user_module
from flashwright.simulator.errors import ErrorKind
from flashwright.workbench.check import launches
from flashwright.workbench.check.sarif import RULES

RACY = """__global__ void shift(const float *x, float *y) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = s[(threadIdx.x + 32) % 64];
}
"""
SOUND = RACY.replace("    y[", "    __syncthreads();\n    y[")
LAUNCH = ("--block", "64", "--arg", "range:f32:64", "--arg", "empty:f32:64")


@pytest.fixture
def working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "racy.cu").write_text(RACY)
    (tmp_path / "sound.cu").write_text(SOUND)
    return tmp_path


def test_a_sound_kernel_has_exit_code_0(working: Path) -> None:
    code, out, error = flashwright("check", "sound.cu", *LAUNCH)
    assert (code, out, error) == (0, "sound.cu: nothing found in 1 launch\n", "")


def test_a_race_has_exit_code_1_and_both_of_its_lines_as_compilers_write_them(working: Path) -> None:
    code, out, _ = flashwright("check", "racy.cu", *LAUNCH)
    assert code == 1
    assert "racy.cu:4: race: shared load not ordered after a write by another thread (64 times)" in out
    assert "racy.cu:3: note: write by warp 1, lane 0" in out
    assert out.endswith("racy.cu: 1 finding in 1 launch\n")


def test_all_faults_are_listed_and_a_fault_that_is_no_hazard_is_the_last(working: Path) -> None:
    code, out, _ = flashwright("check", "racy.cu", "--block", "64", "--arg", "range:f32:64", "--arg", "empty:f32:32",
                               "--format", "json")  # fmt: skip
    (document,) = json.loads(out)["files"]
    assert code == 1 and [item["kind"] for item in document["findings"]] == ["race", "out-of-bounds"]
    (launch,) = document["launches"]
    assert launch["kernel"] == "shift" and not launch["ended"]


def test_a_kind_that_is_ignored_is_not_found(working: Path) -> None:
    assert flashwright("check", "racy.cu", *LAUNCH, "--hazards", "race=ignore")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.cu",), "missing.cu"),
        (("racy.cu",), "kernel shift takes 2 arguments"),
        (("racy.cu", *LAUNCH, "--kernel", "other"), "there is no 'other'"),
        (("racy.cu", *LAUNCH, "-D", "s=1+"), "does not compile"),
        (("racy.cu", *LAUNCH, "--output", "nowhere/report.txt"), "there is no directory nowhere"),
        (("(BF16, 64, 64, 64, 4): load_2_2_2_tiles",), "expected a file that ends in .cu, .cuh, .ptx"),
        (("racy.cu", *LAUNCH, "--format", "xml"), "xml"),
    ],
)
def test_what_cannot_be_checked_has_exit_code_2(working: Path, arguments: tuple[str, ...], message: str) -> None:
    code, _, error = flashwright("check", *arguments)
    assert code == 2
    assert message in error


def test_an_unknown_instruction_is_not_taken_for_a_fault_of_the_kernel(working: Path) -> None:
    (working / "k.ptx").write_text(
        ".version 8.5\n.target sm_80\n.address_size 64\n.visible .entry k() { frobnicate; ret; }\n"
    )
    code, _, error = flashwright("check", "k.ptx")
    assert code == 2 and "frobnicate" in error


def test_comments_of_the_file_say_what_to_launch(working: Path) -> None:
    directives = "".join(
        f"// flashwright check: --grid {grid} --block 64 --arg random:f32:64 --arg empty:f32:64\n" for grid in (1, 2)
    )
    (working / "self.cu").write_text(directives + RACY)
    code, out, _ = flashwright("check", "self.cu", "--format", "json")
    (document,) = json.loads(out)["files"]
    assert code == 1
    assert [launch["grid"] for launch in document["launches"]] == [[1, 1, 1], [2, 1, 1]]
    assert [item["count"] for item in document["findings"]] == [3 * 64]  # each place once
    assert flashwright("check", "self.cu", *LAUNCH)[1].endswith("in 1 launch\n")  # the command line goes first


def test_options_that_say_nothing_of_the_launch_are_for_all_comments(working: Path) -> None:
    comment = f"// flashwright check: {' '.join(LAUNCH)}"
    (working / "self.cu").write_text(f"{comment} -D LATER\n{comment} --hazards collect\n{RACY}")
    _, out, _ = flashwright("check", "self.cu", "--format", "json", "--hazards", "race=ignore", "--arch", "sm_90")
    (document,) = json.loads(out)["files"]
    assert [len(launch["findings"]) for launch in document["launches"]] == [0, 1]


def test_a_file_is_compiled_once_for_all_launches_alike(working: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def record(*arguments: Any, **options: Any) -> Any:
        compiled.append(options["options"])
        return user_module(*arguments, **options)

    monkeypatch.setattr(launches, "user_module", record)
    lines = [f"// flashwright check: {' '.join(LAUNCH)} {more}\n" for more in ("", "--seed 1", "-D X")]
    (working / "self.cu").write_text("".join(lines) + SOUND)
    assert flashwright("check", "self.cu")[0] == 0
    assert compiled == [[], ["--define-macro=X"]]


def test_a_comment_that_is_no_launch_is_quoted(working: Path) -> None:
    (working / "self.cu").write_text("// flashwright check: --bloc 64\n" + RACY)
    code, _, error = flashwright("check", "self.cu")
    assert code == 2 and "// flashwright check: --bloc 64: No such option: --bloc" in error


def test_ptx_without_lines_is_reported_by_its_own(working: Path) -> None:
    (working / "k.ptx").write_text(
        ".version 8.5\n.target sm_80\n.address_size 64\n.visible .entry k() {\n"
        ".shared .b32 s;\n.reg .b32 %r<2>;\nld.shared.u32 %r1, [s];\nret;\n}\n"
    )
    code, out, _ = flashwright("check", "k.ptx")
    assert code == 1 and out.startswith("k.ptx:7: uninitialised-shared: ")


def test_several_files_are_checked_and_one_that_cannot_be_does_not_keep_the_others(working: Path) -> None:
    code, out, error = flashwright("check", "racy.cu", "missing.cu", "sound.cu", *LAUNCH)
    assert code == 2 and "missing.cu" in error
    assert (
        "racy.cu: 1 finding in 1 launch" in out
        and "missing.cu: not checked" in out
        and "sound.cu: nothing found in 1 launch" in out
    )
    assert flashwright("check", "sound.cu", "racy.cu", *LAUNCH)[0] == 1


# SARIF -------------------------------------------------------------------------------------------------------


def sarif_of(*arguments: str) -> dict[str, Any]:
    _, out, error = flashwright("check", *arguments, "--format", "sarif")
    assert not error
    return json.loads(out)


def test_sarif_names_the_file_the_line_and_the_other_line(working: Path) -> None:
    document = sarif_of("racy.cu", *LAUNCH)
    assert document["version"] == "2.1.0" and document["$schema"].endswith("sarif-2.1.0.json")
    (run,) = document["runs"]
    (result,) = run["results"]
    place = {"artifactLocation": {"uri": "racy.cu"}, "region": {"startLine": 4}}
    assert result["locations"] == [{"physicalLocation": place}]
    assert result["relatedLocations"][0]["physicalLocation"]["region"] == {"startLine": 3}
    assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "race"
    assert result["level"] == "error" and result["occurrenceCount"] == 64
    assert "not ordered after a write" in result["message"]["text"]


def test_sarif_of_a_sound_kernel_has_no_results(working: Path) -> None:
    assert sarif_of("sound.cu", *LAUNCH)["runs"][0]["results"] == []


def test_sarif_says_what_could_not_be_checked(working: Path) -> None:
    _, out, _ = flashwright("check", "sound.cu", "missing.cu", *LAUNCH, "--format", "sarif")
    (invocation,) = json.loads(out)["runs"][0]["invocations"]
    assert not invocation["executionSuccessful"]
    assert "missing.cu" in invocation["toolExecutionNotifications"][0]["message"]["text"]
    assert sarif_of("sound.cu", *LAUNCH)["runs"][0]["invocations"][0]["executionSuccessful"]


def test_sarif_has_paths_relative_to_the_working_directory(working: Path) -> None:
    absolute = str(working / "racy.cu")
    for target in (absolute, "./racy.cu"):
        location = sarif_of(target, *LAUNCH)["runs"][0]["results"][0]["locations"][0]
        assert location["physicalLocation"]["artifactLocation"]["uri"] == "racy.cu"


def test_a_finding_keeps_its_fingerprint_when_lines_move(working: Path) -> None:
    (working / "moved.cu").write_text("\n\n" + RACY)
    prints = [
        sarif_of(file, *LAUNCH)["runs"][0]["results"][0]["partialFingerprints"] for file in ("racy.cu", "moved.cu")
    ]
    assert prints[0] == prints[1]


REQUIRED_AND_ALLOWED = {
    "sarifLog": ({"version", "runs"}, {"$schema"}),
    "run": ({"tool"}, {"columnKind", "invocations", "results"}),
    "tool": ({"driver"}, set()),
    "toolComponent": ({"name"}, {"semanticVersion", "rules"}),
    "reportingDescriptor": ({"id"}, {"shortDescription"}),
    "multiformatMessageString": ({"text"}, set()),
    "invocation": ({"executionSuccessful"}, {"toolExecutionNotifications"}),
    "notification": ({"message"}, {"level"}),
    "result": (
        {"message"},
        {"ruleId", "ruleIndex", "level", "locations", "relatedLocations", "occurrenceCount", "partialFingerprints"},
    ),
    "location": (set(), {"id", "message", "physicalLocation"}),
    "physicalLocation": (set(), {"artifactLocation", "region"}),
    "artifactLocation": (set(), {"uri"}),
    "region": (set(), {"startLine"}),
    "message": ({"text"}, set()),
}
"""By definition of the SARIF 2.1.0 schema, which allows no other properties: those that it requires, and those of the
others that a report has. `message` needs a text or an id."""
DEFINITIONS = {
    "runs": "run",
    "tool": "tool",
    "driver": "toolComponent",
    "rules": "reportingDescriptor",
    "shortDescription": "multiformatMessageString",
    "invocations": "invocation",
    "toolExecutionNotifications": "notification",
    "results": "result",
    "locations": "location",
    "relatedLocations": "location",
    "physicalLocation": "physicalLocation",
    "artifactLocation": "artifactLocation",
    "region": "region",
    "message": "message",
}
VALUES: dict[str, Any] = {
    "version": lambda value: value == "2.1.0",
    "columnKind": lambda value: value in ("utf16CodeUnits", "unicodeCodePoints"),
    "level": lambda value: value in ("none", "note", "warning", "error"),
    "executionSuccessful": lambda value: isinstance(value, bool),
    "ruleIndex": lambda value: isinstance(value, int) and value >= -1,
    "id": lambda value: isinstance(value, str) or value >= -1,
    "startLine": lambda value: isinstance(value, int) and value >= 1,
    "occurrenceCount": lambda value: isinstance(value, int) and value >= 1,
    "partialFingerprints": lambda value: all(isinstance(digest, str) for digest in value.values()),
    "uri": lambda value: re.fullmatch(r"(file:///)?([\w./~-]|%[0-9A-F]{2})+", value, re.ASCII),
}


def check_sarif(value: dict[str, Any], definition: str = "sarifLog") -> None:
    """The structure that the schema demands, of all that a report of ours may have."""
    required, allowed = REQUIRED_AND_ALLOWED[definition]
    assert required <= value.keys() <= required | allowed, (definition, value.keys())
    for key, item in value.items():
        for each in item if isinstance(item, list) else [item]:
            if key in DEFINITIONS:
                check_sarif(each, DEFINITIONS[key])
            else:
                assert VALUES.get(key, lambda text: isinstance(text, str))(each), (definition, key, each)


def test_sarif_has_the_structure_that_its_schema_demands(working: Path) -> None:
    (working / "a kernel, übrig {1}.cu").write_text(RACY)
    (working / "k.ptx").write_text(user_module(working / "racy.cu").ptx)
    files = ("racy.cu", "a kernel, übrig {1}.cu", "k.ptx", "missing{0}.cu")
    short = ("--block", "64", "--arg", "range:f32:64", "--arg", "empty:f32:32")
    for launch in (LAUNCH, short):
        code, out, _ = flashwright("check", *files, *launch, "--format", "sarif")
        assert code == 2
        document = json.loads(out)
        check_sarif(document)
        (run,) = document["runs"]
        assert len(run["results"]) == 3 * (1 if launch is LAUNCH else 2)
        texts = [
            item["message"]["text"] for item in (*run["results"], *run["invocations"][0]["toolExecutionNotifications"])
        ]
        assert not any(re.search(r"\{\d\}", text.replace("{{", "").replace("}}", "")) for text in texts)


def test_every_kind_of_fault_is_a_rule() -> None:
    assert set(RULES) == set(get_args(ErrorKind)) - {"unsupported"}


def test_a_report_is_written_to_a_file(working: Path) -> None:
    code, out, _ = flashwright("check", "racy.cu", *LAUNCH, "--format", "sarif", "--output", "report.sarif")
    assert (code, out) == (1, "")
    assert json.loads((working / "report.sarif").read_text())["runs"][0]["results"]


UNFENCED = """
#define ASM asm volatile
__global__ void k(const float *x, float *y) {
    __shared__ __align__(16) float s[32];
    __shared__ __align__(8) unsigned long long full;
    unsigned bar = (unsigned)__cvta_generic_to_shared(&full), to = (unsigned)__cvta_generic_to_shared(s);
    if (threadIdx.x == 0) {
        ASM("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar) : "memory");
        ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 128;" :: "r"(bar) : "memory");
        ASM("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];"
            :: "r"(to), "l"(x), "r"(bar) : "memory");
    }
    __syncthreads();
    ASM("{ .reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra L; }" :: "r"(bar) : "memory");
    y[threadIdx.x] = s[threadIdx.x];
}
"""


def test_a_warning_is_reported_and_does_not_fail_the_check(working: Path) -> None:
    (working / "unfenced.cu").write_text(UNFENCED)
    launch = ("unfenced.cu", "--arch", "sm_90a", "--arg", "range:f32:32", "--arg", "empty:f32:32")
    code, out, error = flashwright("check", *launch)
    assert code == 0, error
    assert "unfenced.cu:10: warning: mbarrier-fence:" in out and "1 finding" in out
    assert [result["level"] for result in sarif_of(*launch)["runs"][0]["results"]] == ["warning"]


def test_a_file_that_is_not_there_is_named() -> None:
    code, _, error = flashwright("check", "missing.cu")
    assert code == 2 and "error: missing.cu: No such file or directory" in error
