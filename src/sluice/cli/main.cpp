// SPDX-License-Identifier: Apache-2.0
#include <malloc.h>
#include <torch/version.h>

#include <climits>
#include <string>

#include "sluice/cli/bench.h"
#include "sluice/cli/complete.h"
#include "sluice/cli/export.h"
#include "sluice/cli/flops.h"
#include "sluice/cli/generate.h"
#include "sluice/cli/init.h"
#include "sluice/cli/inspect.h"
#include "sluice/cli/merge_lora.h"
#include "sluice/cli/plan.h"
#include "sluice/cli/rl.h"
#include "sluice/cli/score.h"
#include "sluice/cli/sft.h"
#include "sluice/cli/slice.h"
#include "sluice/cli/tokenize.h"

namespace {

// libtorch reports a failed allocation as an ordinary error of its own.
bool is_out_of_memory(const std::exception& error) {
  const std::string text = error.what();
  const auto says = [&](const char* words) { return text.find(words) != std::string::npos; };
  return says("not enough memory") || says("out of memory") || says("can't allocate memory");
}

// A step's tensors come and go in the same sizes. Their pages are kept for the next step; returning them to the system
// and clearing them again costs a tenth of a small model's step.
void keep_pages() {
  ::mallopt(M_MMAP_THRESHOLD, INT_MAX);
  ::mallopt(M_TRIM_THRESHOLD, INT_MAX);
}

}  // namespace

int main(int argc, char** argv) {
  using namespace sluice;
  keep_pages();
  const Program program{
      .libtorch_version = TORCH_VERSION,
      .commands = {command("init", "make a model folder with random weights", run_init),
                   command("inspect", "show what a model folder holds and what becomes of each tensor", run_inspect),
                   command("tokenize", "text to token ids and back; samples with their loss mask", run_tokenize,
                           {"preprocess"}),
                   command("sft", "fine-tune a model on conversations or text", run_sft,
                           {"train", "finetune", "fine-tune", "pretrain"}),
                   command("rl", "train a model by rewards of its answers", run_rl, {"grpo", "ppo"}),
                   command("score", "log-probabilities of given tokens", run_score, {"eval", "evaluate"}),
                   command("generate", "sample from a model", run_generate, {"chat", "sample", "infer"}),
                   command("flops", "count the operations that a model needs", run_flops),
                   command("plan", "tell the memory that a model needs", run_plan),
                   command("bench", "time a layer beside the floors that its operations and bytes set", run_bench),
                   command("export", "turn a training checkpoint into a model folder", run_export, {"convert"}),
                   command("merge-lora", "make a model folder of a model and a LoRA adapter", run_merge_lora,
                           {"merge"}),
                   command("slice", "keep the first layers of a model", run_slice),
                   command("complete", "add to a model folder what it lacks of its base", run_complete)},
      .is_out_of_memory = is_out_of_memory};
  return run_program(program, {argv + 1, argv + argc});
}
