// SPDX-License-Identifier: Apache-2.0
// Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): beside a frozen projection W [out, in],
//   y = x W^T + scale * (dropout(x) A^T) B^T
// Two small matrices are trained instead of W. Weights of experts [E, out, in] have a pair for each expert.
#pragma once

#include <functional>
#include <utility>

#include "sluice/layers/parameter.h"
#include "sluice/layers/token_split.h"

namespace sluice {

struct LoraSettings {
  std::int64_t rank = 16;
  double alpha = 32;  // scale = alpha / rank
  double dropout = 0;
  std::vector<std::string> targets = {"all-linear"};  // see add_lora()
};

// Which inputs the adapters of a model drop: another part in each numbered forward pass of a run, and the same when a
// pass is computed again in backward. Whether an element is dropped follows from its token, column and adapter alone,
// so every layout of a mesh drops the same.
struct LoraDropout {
  double probability = 0;
  std::uint64_t seed = 0;                  // of the run
  MeshPlace place = {};                    // of this rank
  std::optional<std::uint64_t> pass = {};  // none: nothing is dropped
  TokenSplit tokens = {};                  // of the pass, which has the rank's own tokens or its tensor ranks'
};

// The adapter of one parameter, with names after it: "model.layers.0.mlp.up_proj.lora_A.weight".
struct LoraAdapter {
  Parameter A;  // [rank, in], or [E, rank, in]
  Parameter B;  // [out, rank], or [E, out, rank]
  double scale;
  std::shared_ptr<const LoraDropout> dropout;

  // y + up(scale * down(dropout(x), A), B), where `down` and `up` multiply by a weight as the layer does with its own.
  using Project = std::function<Tensor(const Tensor& x, const Tensor& weight)>;
  Tensor add_to(const Tensor& y, const Tensor& x, const Project& down, const Project& up) const;

  // scale * B A in float32, of the parameter's shape: what merging adds to it.
  Tensor product() const;
};

// Gives an adapter without values to every adaptable parameter that settings.targets name, and freezes all parameters.
// A target is "all-linear" (every projection but those of routed experts) or a module's name or its end from a dot on:
// "q_proj", "mlp.up_proj", "experts.gate_up_proj", with `*` for any characters. Usage error for a target that names
// nothing; it lists what there is.
void declare_lora(const std::vector<Parameter*>& parameters, const LoraSettings& settings);

// declare_lora(), and values as PEFT draws them: A uniform within 1 / sqrt(in), from `seed` and its name alone, and B
// 0. Adapters are held in `dtype`.
void add_lora(const std::vector<Parameter*>& parameters, const LoraSettings& settings, at::ScalarType dtype,
              std::uint64_t seed);

// Gives all adapters one dropout, which the trainer then numbers the passes of. Usage error for a part above 0 where
// routed experts have adapters: PEFT's have none.
std::shared_ptr<LoraDropout> share_dropout(const std::vector<Parameter*>& parameters, double probability,
                                           std::uint64_t seed, const MeshPlace& place = {});

// While it lives, the adapters of these parameters are off: the model is its base.
class WithoutAdapters {
 public:
  explicit WithoutAdapters(const std::vector<Parameter*>& parameters);
  ~WithoutAdapters();
  WithoutAdapters(const WithoutAdapters&) = delete;
  WithoutAdapters& operator=(const WithoutAdapters&) = delete;

 private:
  std::vector<std::pair<Parameter*, std::shared_ptr<LoraAdapter>>> taken_;
};

// Gives a parameter an adapter with these values: A [.., rank, in], B [.., out, rank] for a parameter [.., out, in].
void set_adapter(Parameter& parameter, const Tensor& A, const Tensor& B, double scale);

// A and B of every adapter, in the order of the parameters.
std::vector<Parameter*> lora_parameters(const std::vector<Parameter*>& parameters);

// Where the values of these parameters and of their adapters lie, for work that was recorded over them
// (kernels/common/recorded_work.h).
std::vector<const void*> addresses(const std::vector<Parameter*>& parameters);

// What training changes: the parameters that are not frozen, then the adapters'.
std::vector<Parameter*> trained_parameters(const std::vector<Parameter*>& parameters);

// True of an adaptable parameter [E, out, in]: a tensor of routed experts, which is no module by itself.
bool is_experts(const Parameter& parameter);

// An adaptable parameter as targets name it: "model.layers.0.mlp.up_proj", "model.layers.0.mlp.experts.down_proj".
std::string module_name(const Parameter& parameter);

}  // namespace sluice
