# SPDX-License-Identifier: Apache-2.0
"""Training of four layers of Qwen3.8-Flash-Next at their published widths on one NVIDIA GPU: 512 experts, vocabulary and sparse
attention whole, the n-gram table cut; LoRA on the attention layers' projections, experts frozen, one sequence of 8,192 tokens a step,
bfloat16, random weights and tokens. The weights are drawn by one thread of the CPU, which takes two minutes. Prints one JSON object:
the median step, tokens/s, the use of the product's measured rate, peak memory."""
import argparse
import json
import pathlib
import subprocess
import tempfile

from gpu_training import ROOT, ours
from real_width import CONFIGS, LAYERS, SHARED

TOKENS, STEPS = 8192, 8
WHOLE = {"num_hidden_layers": LAYERS, "num_experts": 512, "vocab_size": 248320, "indexer_budget": 2048}
LORA = ["--lora.rank", "16", "--lora.targets", "q_proj,k_proj,v_proj,o_proj,in_proj_qkv,in_proj_z,out_proj"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sluice", default=ROOT / "build" / "release" / "sluice")
    parser.add_argument("--folder", default="/dev/shm", help="24 GB must fit there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = pathlib.Path(name)
        (folder / "config.json").write_text(json.dumps(SHARED | CONFIGS["Qwen3.8-Flash-Next"] | WHOLE))
        subprocess.run([arguments.sluice, "init", "--config", folder / "config.json", "--out", folder / "model", "--tokenizer",
                        ROOT / "examples" / "tiny" / "tokenizer", "--quiet"], check=True)
        row = ours(arguments.sluice, folder / "model", folder, 1, TOKENS, STEPS, LORA)
    print(json.dumps({"model": "Qwen3.8-Flash-Next, 4 layers", "dtype": "bfloat16", "tokens": TOKENS} | row))


if __name__ == "__main__":
    main()
