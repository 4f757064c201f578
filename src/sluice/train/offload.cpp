// SPDX-License-Identifier: Apache-2.0
#include "sluice/train/offload.h"

#include <cassert>

namespace sluice {
namespace {

// States begin at pages of their own, so that hints for one leave the others alone.
constexpr std::size_t kPage = 4096;

std::span<const std::byte> bytes_of(const Tensor& state) {
  return {static_cast<const std::byte*>(state.const_data_ptr()), state.nbytes()};
}

}  // namespace

StatePlaces::StatePlaces(const OffloadSettings& settings, at::Device device, std::int64_t elements, std::int64_t count)
    : settings_(settings), device_(device) {
  if (settings.where != Offload::kDisk) return;
  const auto bytes = static_cast<std::size_t>(elements) * sizeof(float) + static_cast<std::size_t>(count) * kPage;
  file_ = std::make_shared<ScratchFile>(settings.folder, bytes);
}

Tensor StatePlaces::next(std::int64_t rows, std::int64_t columns) {
  const auto options = at::TensorOptions().dtype(kFloat);
  if (settings_.where == Offload::kOff) return at::zeros({rows, columns}, options.device(device_));
  if (settings_.where == Offload::kHost) {
    return at::zeros({rows, columns}, options.pinned_memory(device_.is_cuda()));
  }
  const auto bytes = static_cast<std::size_t>(rows * columns) * sizeof(float);
  assert(used_ + bytes <= file_->bytes().size());
  auto* const place = file_->bytes().data() + used_;
  used_ += (bytes + kPage - 1) / kPage * kPage;
  return at::from_blob(
      place, {rows, columns}, [file = file_](void*) {}, options);
}

void StatePlaces::expect(const std::vector<Tensor>& states) const {
  if (file_ == nullptr) return;
  for (const auto& state : states) ScratchFile::expect(bytes_of(state));
}

void StatePlaces::release(const std::vector<Tensor>& states) const {
  if (file_ == nullptr) return;
  for (const auto& state : states) ScratchFile::release(bytes_of(state));
}

}  // namespace sluice
