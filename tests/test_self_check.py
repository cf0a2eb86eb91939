"""An engine that computes something else than its build recorded is refused when it is loaded."""

import json
import shutil

import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file
from shell import speccompile

from speccompile.export.directory import SAMPLES, write_manifest
from speccompile.export.errors import UserError
from speccompile.runtime import Engine

DRAFT = tiny.FAMILIES["causal-depth"]


def with_files_of(engine: Engine, other: Engine, out, names):
    """A copy of an engine directory with some files of another, and a manifest that finds nothing wrong with it."""
    shutil.copytree(engine.directory.path, out)
    for name in names:
        shutil.copyfile(other.directory.path / name, out / name)
    write_manifest(out, {})
    return Engine.load(out, threads=1)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("backend", ["onnxruntime", "torch"])
def test_another_target_is_found_out(pairs, tmp_path, backend, batch):
    options = dict(draft=DRAFT, backend=backend, dtype="float32")
    engine, other = pairs(**options).engine, pairs(target=dict(seed=5), **options).engine
    weights = {"onnxruntime": ["rank0.weights"], "torch": ["rank0.safetensors"]}[backend]
    wrong = with_files_of(engine, other, tmp_path / "wrong", weights)
    for speculation in (True, False):
        with pytest.raises(UserError, match=r"step \d of samples.safetensors gave tokens .* were expected"):
            wrong.generate([[1, 2]] * batch, 4, speculation=speculation)
    said = speccompile("run", tmp_path / "wrong", "--prompt-ids", "1", code=2).stderr
    assert "does not compute what its build recorded" in " ".join(said.split())


def test_another_draft_is_found_out(pairs, tmp_path):
    """Its text would be right, which is why nothing else would say so."""
    engine, other = pairs(draft=DRAFT).engine, pairs(draft=DRAFT | dict(seed=5)).engine
    wrong = with_files_of(engine, other, tmp_path / "wrong", ["rank0.weights"])
    with pytest.raises(UserError, match="drafts something else .* of the proposals are equal, at least 90%"):
        wrong.generate([[1, 2]], 4)
    assert (
        wrong.generate([[1, 2]], 8, speculation=False)[0].token_ids
        == engine.generate([[1, 2]], 8)[0].token_ids
    )


def test_close_choices_are_not_held_against_it(pairs, tmp_path):
    engine = pairs(draft=DRAFT).engine
    wrong = with_files_of(engine, engine, tmp_path / "wrong", [])
    samples = load_file(wrong.directory.path / SAMPLES)
    samples["0.emitted"] += 1
    for clear in (1, 0):
        save_file(samples | {"0.clear": np.full((), clear)}, wrong.directory.path / SAMPLES)
        if clear:
            with pytest.raises(UserError, match="step 0 of"):
                wrong.session(1)
        else:
            wrong.session(1)


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_the_recorded_steps_cover_prefill_and_acceptance(pairs, family):
    """One step accepts a proposal, whatever the draft; at least two feed the prompt, of the build's 48 tokens."""
    path = pairs(draft=tiny.FAMILIES[family]).engine.directory.path
    samples = load_file(path / SAMPLES)
    known = [samples[f"{i}.num_known"].item() for i in range(5)]
    emitted = [samples[f"{i}.num_emitted"].item() for i in range(5)]
    assert known == [24, 24, 1, 1, 1] and emitted[:2] == [1, 1] and emitted[3] >= 2
    assert samples["1.next_tokens"] == [-1] and samples["0.next_tokens"] == samples["1.tokens"][:, 0]
    assert json.loads((path / "manifest.json").read_text())["files"][SAMPLES]


def test_samples_that_cannot_be_read(pairs, tmp_path):
    engine = pairs(draft=DRAFT).engine
    wrong = with_files_of(engine, engine, tmp_path / "wrong", [])
    (wrong.directory.path / SAMPLES).write_bytes(b"{}")
    with pytest.raises(UserError, match="samples.safetensors cannot be read"):
        wrong.session(1)
