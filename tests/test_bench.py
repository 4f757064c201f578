# SPDX-License-Identifier: Apache-2.0
"""`sluice bench`: a row for each size, with times that hold together; refusals. How fast is for bench/ to say."""
from conftest import run

SMALL = ["--device", "cpu", "--dtype", "float32", "--hidden_size", 64, "--head_dim", 32]


def test_a_row_for_each_size():
    table = run("bench", "gated_delta_net", *SMALL, "--key_heads", 1, "--value_heads", 2, "--tokens", "64,256", "--sequences", 2).stdout
    rows = [line.replace("|", " ").replace("%", " ").split() for line in table.splitlines()[-2:]]
    assert [int(row[0]) for row in rows] == [64, 256]
    for row in rows:
        layer, layer_share, both, both_share, rule, rule_share, rule_both, rule_both_share, peak = map(float, row[1:])
        assert 0 < layer < both and 0 < rule < rule_both
        assert all(0 <= share <= 100 for share in (layer_share, both_share, rule_share, rule_both_share))
        assert peak > 0


def test_what_is_refused():
    def refusal(*options):
        done = run("bench", *options, check=False)
        assert done.returncode == 2
        return done.stderr
    assert "gated_delta_net" in refusal("attention")
    assert "expected a multiple of key_heads, 3; got 4" in refusal("gated_delta_net", *SMALL, "--key_heads", 3, "--value_heads", 4)
    assert "expected a multiple of sequences, 3; got 64" in refusal("gated_delta_net", *SMALL, "--tokens", 64, "--sequences", 3)
