// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/flops.h"

#include <algorithm>
#include <utility>

namespace sluice {

double total(const Operations& operations) {
  double sum = 0;
  for (const auto& [part, count] : operations) sum += count;
  return sum;
}

double training_operations(const Objective& objective, std::span<const PackedBatch> packs) {
  double sum = 0;
  for (const auto& pack : packs) {
    std::vector<std::int64_t> lengths;
    for (std::size_t n = 0; n + 1 < pack.cu_seqlens.size(); ++n) {
      lengths.push_back(pack.cu_seqlens[n + 1] - pack.cu_seqlens[n]);
    }
    const auto asked = std::ranges::count_if(pack.targets, [](auto target) { return target >= 0; });
    const auto decoder = total(objective.decoder.forward_operations(lengths, asked));
    // Frozen weights have no gradient of their own: under adapters that is a third less; with mtp_only nothing goes
    // back.
    const auto factor = objective.mtp_only ? 1 : objective.adapters ? kTrainingFactor - 1 : kTrainingFactor;
    sum += factor * decoder;
    if (objective.mtp == nullptr) continue;
    const auto head = objective.decoder.head_operations(next_tokens_asked(pack));
    sum += kTrainingFactor * (total(objective.mtp->forward_operations(lengths)) + head);
  }
  return sum;
}

std::optional<double> peak_operations_per_s(std::string_view device_name, at::ScalarType dtype) {
  // Of the Hopper products, those with full power limits share one rate.
  constexpr std::pair<std::string_view, double> kPeaks[] = {{"NVIDIA H200", 989e12},
                                                            {"NVIDIA H100 80GB HBM3", 989e12},
                                                            {"NVIDIA GH200 120GB", 989e12},
                                                            {"NVIDIA GH200 480GB", 989e12},
                                                            {"NVIDIA H100 PCIe", 756e12}};
  const auto* found = std::ranges::find(kPeaks, device_name, [](const auto& peak) { return peak.first; });
  return dtype == kBFloat16 && found != std::end(kPeaks) ? std::optional(found->second) : std::nullopt;
}

}  // namespace sluice
