"""samples/cpp: compiled against ONNX Runtime's headers where they are at hand, it decodes as the Python session does."""

import os
import shutil
import subprocess
from pathlib import Path

import onnxruntime
import pytest
import tiny

SAMPLE = Path(__file__).parents[1] / "samples" / "cpp"
INCLUDES = [
    Path(p) for p in (os.environ.get("SPECCOMPILE_TEST_INCLUDE"), "/usr/local/include", "/usr/include") if p
]


def header(name: str) -> Path | None:
    folders = (folder for include in INCLUDES for folder in (include, include / "onnxruntime"))
    return next((folder for folder in folders if (folder / name).exists()), None)


API, JSON = header("onnxruntime_cxx_api.h"), header("nlohmann/json.hpp")
pytestmark = pytest.mark.skipif(
    not (API and JSON and shutil.which("cmake")),
    reason="cmake, onnxruntime_cxx_api.h or nlohmann/json.hpp is missing (SPECCOMPILE_TEST_INCLUDE names a folder)",
)


@pytest.fixture(scope="module")
def decode(tmp_path_factory):
    """Runs the compiled sample: (engine, budget, prompt) -> its process."""
    folder = tmp_path_factory.mktemp("cpp")
    (library,) = (Path(onnxruntime.__path__[0]) / "capi").glob("libonnxruntime.so.*")
    found = (
        f"-DONNXRUNTIME_INCLUDE={API}",
        f"-DNLOHMANN_JSON_INCLUDE={JSON}",
        f"-DONNXRUNTIME_LIBRARY={library}",
    )
    subprocess.run(["cmake", "-S", SAMPLE, "-B", folder, *found], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", folder], check=True, capture_output=True)

    def run(engine, budget, prompt):
        command = [folder / "decode", engine, str(budget), *map(str, prompt)]
        return subprocess.run(command, capture_output=True, text=True)

    return run


@pytest.mark.parametrize("family", ["causal-depth", "eagle3", "domino", "dspark"])
def test_it_decodes_as_python_does(pairs, decode, family):
    pair = pairs(draft=tiny.FAMILIES[family])
    for prompt, budget in (([3], 24), ([1, 2, 7, 3, 3], 40), ([0, 4, 1, 3, 2, 3, 6] * 3, 100)):
        (expected,) = pair.engine.generate([prompt], budget)
        done = decode(pair.engine.directory.path, budget, prompt)
        assert done.stdout.split() == [str(token) for token in expected.token_ids]
        assert f"in {len(expected.acceptance_lengths)} decode steps" in done.stderr


def test_an_engine_that_can_sample_is_decoded_greedily(pairs, decode):
    pair = pairs(draft=tiny.FAMILIES["causal-depth"], sampling=True)
    (expected,) = pair.engine.generate([[3, 1, 2]], 24)
    done = decode(pair.engine.directory.path, 24, [3, 1, 2])
    assert done.stdout.split() == [str(token) for token in expected.token_ids]


def test_it_cuts_blocks_by_confidence(pairs, decode):
    pair = pairs(draft=tiny.FAMILIES["dspark"], confidence_threshold=0.5)
    (expected,) = pair.engine.generate([[3, 1, 2]], 24)
    done = decode(pair.engine.directory.path, 24, [3, 1, 2])
    assert done.stdout.split() == [str(token) for token in expected.token_ids]
    assert f"in {len(expected.acceptance_lengths)} decode steps" in done.stderr


@pytest.mark.parametrize(
    ("prompt", "words"),
    [(["99999"], "outside the vocabulary"), ([1] * 65, "at most 64"), ([], "usage: decode")],
)
def test_bad_input_is_one_line(pairs, decode, prompt, words):
    done = decode(pairs().engine.directory.path, 4, prompt)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1


def test_a_directory_that_is_no_engine(decode, tmp_path):
    done = decode(tmp_path, 4, [1])
    assert done.returncode == 2 and "config.json cannot be read" in done.stderr
