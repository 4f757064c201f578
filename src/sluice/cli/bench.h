// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sluice/config/app.h"
#include "sluice/kernels/common/device.h"
#include "sluice/train/options.h"

namespace sluice {

// `sluice bench gated_delta_net`: how long a layer takes on this machine, beside the floors that its operations and
// bytes set. The peers, which are Python packages, stand in bench/gated_delta_net.py.
struct BenchOptions {
  std::string layer;
  std::vector<std::int64_t> tokens{4096, 8192, 16384, 32768, 65536};
  std::int64_t sequences = 1;
  std::int64_t hidden_size = 2560;
  std::int64_t key_heads = 16, value_heads = 48;
  std::int64_t head_dim = 128;
  DeviceChoice device = DeviceChoice::kAuto;
  Precision dtype = PrecisionOptions().dtype;
  void describe(OptionList& option) {
    option("layer", layer, "what is timed", {.choices = {"gated_delta_net"}, .required = true, .positional = true});
    option("tokens", tokens, "tokens of a pack, one row of the table each", {.unit = "tokens", .min = 1});
    option("sequences", sequences, "sequences of a pack, all of one length", {.min = 1});
    option("hidden_size", hidden_size, "width of the layer's input", {.min = 1});
    option("key_heads", key_heads, "linear_num_key_heads of a model's config.json", {.min = 1});
    option("value_heads", value_heads, "linear_num_value_heads", {.min = 1});
    option("head_dim", head_dim, "linear_key_head_dim and linear_value_head_dim", {.min = 1});
    option("device", device, kDeviceSentence, {.choices = {"auto", "cpu", "cuda"}});
    option("dtype", dtype, "of activations and weights", {.choices = {"float32", "bfloat16"}});
  }
};

ExitCode run_bench(const BenchOptions& options, const Invocation& invocation);

}  // namespace sluice
