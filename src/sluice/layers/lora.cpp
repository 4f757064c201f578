// SPDX-License-Identifier: Apache-2.0
#include "sluice/layers/lora.h"

#include <ATen/Parallel.h>
#include <fmt/ranges.h>
#include <xxhash.h>

#include <cassert>
#include <cmath>
#include <set>

#include "sluice/core/error.h"
#include "sluice/core/wildcard.h"

namespace sluice {
namespace {

constexpr std::string_view kAllLinear = "all-linear";
constexpr std::string_view kWeight = ".weight";

bool names(const std::string& target, const Parameter& parameter) {
  if (target == kAllLinear) return !is_experts(parameter);
  const auto module = module_name(parameter);
  return matches(target, module) || matches("*." + target, module);
}

// "mlp.up_proj": what follows the number of the layer.
std::string short_name(const Parameter& parameter) {
  const auto module = module_name(parameter);
  const auto digit = module.find_last_of("0123456789");
  const auto dot = digit == std::string::npos ? std::string::npos : module.find('.', digit);
  return dot == std::string::npos ? module : module.substr(dot + 1);
}

void check_targets(const std::vector<std::string>& targets, const std::vector<Parameter*>& adaptable) {
  std::set<std::string> known{std::string(kAllLinear)};
  for (const auto* parameter : adaptable) known.insert(short_name(*parameter));
  if (targets.empty()) fail_usage("lora.targets is empty; this model has: {}", fmt::join(known, ", "));
  for (const auto& target : targets) {
    const bool found =
        std::ranges::any_of(adaptable, [&](const Parameter* parameter) { return names(target, *parameter); });
    if (!found)
      fail_usage("lora.targets: no projection is named {}; this model has: {}", target, fmt::join(known, ", "));
  }
}

// Without values.
std::shared_ptr<LoraAdapter> make_adapter(const Parameter& parameter, std::int64_t rank, double scale) {
  auto shape_a = parameter.shape, shape_b = parameter.shape;
  shape_a[shape_a.size() - 2] = rank;
  shape_b.back() = rank;
  const auto bound = 1 / std::sqrt(static_cast<double>(parameter.shape.back()));
  const auto module = module_name(parameter);
  auto adapter = std::make_shared<LoraAdapter>(
      LoraAdapter{.A = {.name = module + ".lora_A.weight", .shape = shape_a, .init = Init::uniform(-bound, bound)},
                  .B = {.name = module + ".lora_B.weight", .shape = shape_b, .init = Init::constant(0)},
                  .scale = scale,
                  .dropout = std::make_shared<LoraDropout>()});
  // What multiplies the split side of the weight is split with it.
  if (is_experts(parameter) || parameter.split.dim == 1) adapter->A.split = parameter.split;
  if (is_experts(parameter) || parameter.split.dim == 0) adapter->B.split = parameter.split;
  return adapter;
}

// A number that looks drawn, of any bits (the finaliser of SplitMix64; Steele, Lea, Flood 2014).
std::uint64_t mixed(std::uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
  return bits ^ (bits >> 31);
}

// x [T, in] without the elements that the adapter with this A drops, the others scaled up. Drawn on the CPU, so that
// every device drops the same.
Tensor drop(const Tensor& x, const LoraDropout& dropout, const Parameter& A) {
  if (!dropout.pass || dropout.probability == 0) return x;
  const auto rows = x.size(0), columns = x.size(1), width = A.shape.back();
  const auto& tokens = dropout.tokens;
  assert(rows == tokens.count || rows == tokens.context_count);
  const auto first_token = rows == tokens.count ? tokens.first : tokens.context_first;
  const auto first_column = boxes_of(A, dropout.place)[0].column;
  const auto pass = XXH3_64bits_withSeed(&*dropout.pass, sizeof(*dropout.pass), dropout.seed);
  const auto key = XXH3_64bits_withSeed(A.name.data(), A.name.size(), pass);
  const auto keep = static_cast<float>(1 - dropout.probability);
  const auto mask = at::empty({rows, columns}, kFloat);
  auto* const out = mask.mutable_data_ptr<float>();
  at::parallel_for(0, rows, 16, [&](std::int64_t begin, std::int64_t end) {
    for (auto row = begin; row < end; ++row) {
      const auto element = static_cast<std::uint64_t>((first_token + row) * width + first_column);
      for (std::int64_t c = 0; c < columns; ++c) {
        const auto drawn = mixed(key + 0x9e3779b97f4a7c15 * (element + static_cast<std::uint64_t>(c) + 1));
        out[row * columns + c] = static_cast<float>(drawn >> 40) * 0x1p-24F < keep ? 1 / keep : 0;
      }
    }
  });
  return x * mask.to(x.device(), x.scalar_type());
}

}  // namespace

Tensor LoraAdapter::add_to(const Tensor& y, const Tensor& x, const Project& down, const Project& up) const {
  return y + up(scale * down(drop(x, *dropout, A), A.value), B.value);
}

Tensor LoraAdapter::product() const { return scale * at::matmul(B.value.to(kFloat), A.value.to(kFloat)); }

void declare_lora(const std::vector<Parameter*>& parameters, const LoraSettings& settings) {
  std::vector<Parameter*> adaptable;
  std::ranges::copy_if(parameters, std::back_inserter(adaptable), [](const Parameter* p) { return p->adaptable; });
  check_targets(settings.targets, adaptable);
  const auto scale = settings.alpha / static_cast<double>(settings.rank);
  for (auto* parameter : adaptable) {
    const bool wanted =
        std::ranges::any_of(settings.targets, [&](const std::string& target) { return names(target, *parameter); });
    if (wanted) parameter->adapter = make_adapter(*parameter, settings.rank, scale);
  }
  for (auto* parameter : parameters) parameter->frozen = true;
}

void add_lora(const std::vector<Parameter*>& parameters, const LoraSettings& settings, at::ScalarType dtype,
              std::uint64_t seed) {
  declare_lora(parameters, settings);
  initialize(lora_parameters(parameters), dtype, seed);
}

std::shared_ptr<LoraDropout> share_dropout(const std::vector<Parameter*>& parameters, double probability,
                                           std::uint64_t seed, const MeshPlace& place) {
  auto dropout = std::make_shared<LoraDropout>(LoraDropout{.probability = probability, .seed = seed, .place = place});
  for (auto* parameter : parameters) {
    if (!parameter->adapter) continue;
    if (probability > 0 && is_experts(*parameter)) {
      fail_usage("lora.dropout must be 0 with {} among lora.targets: adapters of routed experts have none",
                 short_name(*parameter));
    }
    parameter->adapter->dropout = dropout;
  }
  return dropout;
}

WithoutAdapters::WithoutAdapters(const std::vector<Parameter*>& parameters) {
  for (auto* parameter : parameters) {
    if (parameter->adapter) taken_.emplace_back(parameter, std::exchange(parameter->adapter, nullptr));
  }
}

WithoutAdapters::~WithoutAdapters() {
  for (auto& [parameter, adapter] : taken_) parameter->adapter = std::move(adapter);
}

void set_adapter(Parameter& parameter, const Tensor& A, const Tensor& B, double scale) {
  const auto rank = A.size(-2);
  auto adapter = make_adapter(parameter, rank, scale);
  SLUICE_CHECK(A.sizes() == adapter->A.shape && B.sizes() == adapter->B.shape,
               "{}: an adapter of rank {} is A {} and B {}; got A {}, B {}", parameter.name, rank,
               c10::str(at::IntArrayRef(adapter->A.shape)), c10::str(at::IntArrayRef(adapter->B.shape)), describe(A),
               describe(B));
  adapter->A.value = A;
  adapter->B.value = B;
  parameter.adapter = std::move(adapter);
}

std::vector<Parameter*> lora_parameters(const std::vector<Parameter*>& parameters) {
  std::vector<Parameter*> list;
  for (auto* parameter : parameters) {
    if (parameter->adapter) list.insert(list.end(), {&parameter->adapter->A, &parameter->adapter->B});
  }
  return list;
}

std::vector<const void*> addresses(const std::vector<Parameter*>& parameters) {
  std::vector<const void*> all;
  for (const auto& list : {parameters, lora_parameters(parameters)}) {
    for (const auto* parameter : list) {
      if (parameter->value.defined()) all.push_back(parameter->value.const_data_ptr());
    }
  }
  return all;
}

std::vector<Parameter*> trained_parameters(const std::vector<Parameter*>& parameters) {
  std::vector<Parameter*> trained;
  std::ranges::copy_if(parameters, std::back_inserter(trained), [](const Parameter* p) { return !p->frozen; });
  const auto adapters = lora_parameters(parameters);
  trained.insert(trained.end(), adapters.begin(), adapters.end());
  return trained;
}

bool is_experts(const Parameter& parameter) { return parameter.shape.size() == 3; }

std::string module_name(const Parameter& parameter) {
  return parameter.name.ends_with(kWeight) ? parameter.name.substr(0, parameter.name.size() - kWeight.size())
                                           : parameter.name;
}

}  // namespace sluice
