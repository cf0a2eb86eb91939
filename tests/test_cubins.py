"""The block-attention kernel compiled ahead of time, without a GPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
COMMAND = [sys.executable, "-m", "speccompile.plugins.block_attention.cubins"]


@pytest.mark.parametrize(
    ("sm", "dtype"),
    [
        (80, "float16"),
        (86, "bfloat16"),
        (89, "float16"),
        (90, "bfloat16"),
        (100, "float16"),
        (120, "bfloat16"),
    ],
)
def test_every_architecture_compiles_without_spilling(sm, dtype):
    """Every variant at a head size of 128; `--help` of the module says how to ask for others."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    options = "--sm", str(sm), "--head-size", "128", "--dtype", dtype
    done = subprocess.run([*COMMAND, *options], env=environment, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("attend") == 4 and done.stdout.count("combine") == 1


def test_a_spill_is_an_error(monkeypatch, capsys):
    import typer

    from speccompile.plugins.block_attention import cubins

    def compiled(spilled):
        return lambda sm, size, dtype: [
            cubins.Cubin("attend", "attend", sm, dtype, size, 16, False, 4, 255, 0, spilled, b"")
        ]

    for spilled, code in ((0, 0), (8, 1)):
        monkeypatch.setattr(cubins, "compile_kernels", compiled(spilled))
        with pytest.raises(typer.Exit) as ended:
            cubins.main("80", "64", "float16")
        assert ended.value.exit_code == code and "attend" in capsys.readouterr().out
